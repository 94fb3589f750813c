"""ScheduledStep → StepPlan: the same decision, as the message that every rank of the set gets."""

from coordinator.plan import DecodeMode, Gather, Row, Sampling, ScheduledStep
from cp_wire.pb import common_pb2, rank_pb2


def to_step_plan(step: ScheduledStep, ticket: int, timeout_ms: int) -> rank_pb2.StepPlan:
    """Builds the message; its size depends on the step's new tokens and new blocks, never on the length of a context."""
    return rank_pb2.StepPlan(
        ticket=ticket,
        timeout_ms=timeout_ms,
        decode_mode=mode_on_wire(step.decode_mode),
        gather=gather_on_wire(step.gather),
        cost_version=step.cost_version,
        released=step.released,
        admitted=[
            rank_pb2.AdmittedRequest(
                handle=admission.handle,
                sampling=_sampling(admission.sampling),
                shard_offset=admission.shard_offset,
                num_cached_tokens=admission.num_cached_tokens,
                num_prompt_tokens=admission.num_prompt_tokens,
                owner=admission.owner,
                num_prefill_tokens=admission.num_prefill_tokens,
                cached_token_ids=admission.cached_token_ids,
            )
            for admission in step.admitted
        ],
        rows=[_row(row) for row in step.rows],
        ahead=step.ahead,
    )


def mode_on_wire(mode: DecodeMode) -> "common_pb2.DecodeMode.ValueType":
    """The enum value of the same name."""
    return common_pb2.DecodeMode.Value(f"DECODE_MODE_{mode.name}")


def gather_on_wire(gather: Gather) -> "common_pb2.Gather.ValueType":
    """The enum value of the same name."""
    return common_pb2.Gather.Value(f"GATHER_{gather.name}")


def _sampling(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        top_logprobs=sampling.top_logprobs,
        stop_token_ids=sampling.stop_token_ids,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        bias_token_ids=[token for token, _ in sampling.logit_bias],
        biases=[bias for _, bias in sampling.logit_bias],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs or 0,
    )


def _row(row: Row) -> rank_pb2.StepRow:
    return rank_pb2.StepRow(
        handle=row.handle,
        start=row.start,
        token_ids=row.token_ids,
        new_block_ids=[block for blocks in row.new_blocks for block in blocks],
        new_block_counts=[len(blocks) for blocks in row.new_blocks],
        sample=row.sample,
        output_index=row.output_index,
        ban_stop=row.ban_stop,
        score_start=row.score_start,
        score_token_ids=row.score_token_ids,
    )
