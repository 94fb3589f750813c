"""Decode steps of few rows without Python between their programs: a pass is recorded once for each number of rows."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rank_server.attention.batch import AttentionBatch
from rank_server.compiled.tape import NotRecordable, Tape, recording
from rank_server.models.decoder import Attend, DecoderModel
from rank_server.models.table import Model
from rank_server.share import Share

MOST_ROWS = 8
"""A recording holds all that its pass computes on the way; with more rows Python's share of a step is small."""


def few_decodes(share: Share) -> bool:
    """Whether a step's rows are such as passes are recorded for."""
    return 0 < len(share.spans) <= MOST_ROWS and all(span.count == 1 for span in share.spans)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A recording, and where what differs from step to step lies."""

    tape: Tape
    given: tuple[Tensor, ...]
    """What the pass begins with, and the slots of its tokens."""
    hidden: Tensor


class RecordedPasses:
    """Passes of one model. Their results are those of `DecoderModel.forward`, to the bit; each is valid until the next pass.

    progress: is called every now and then while a recorded pass runs.
    """

    def __init__(self, model: DecoderModel, progress: Callable[[], None]) -> None:
        self._model = model
        self._progress = progress
        self._passes: dict[tuple[int, bool], _Pass | None] = {}
        """By number of rows and whether they are split; None: can't be recorded."""

    @classmethod
    def of(cls, model: Model, progress: Callable[[], None]) -> "RecordedPasses | None":
        """None for a model whose passes can't be recorded."""
        return cls(model, progress) if isinstance(model, DecoderModel) and model.compiled else None

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        batch: AttentionBatch,
        split: bool,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """token_ids and positions [T], of T requests that have one row each: see `DecoderModel.forward`. batch: what `attend`
        attends. All rows come back, also for a replica that wants none: a pass that left some out could not be recorded.
        meanwhile: is called once, when Python has least to do.

        Raises what the programs and groups of a pass raise.
        """
        begin = self._model.begin(token_ids, positions)
        key = len(token_ids), split
        found = self._passes.get(key)
        if found is None:
            meanwhile()
            if key not in self._passes:
                return self._record(key, begin, attend, batch)
            return self._model.between(*begin, attend, split)
        for kept, new in zip(found.given, (*begin, batch.slots), strict=True):
            kept.copy_(new)
        found.tape.run(batch, self._progress, meanwhile)
        return found.hidden

    def _record(
        self, key: tuple[int, bool], begin: tuple[Tensor, Tensor, Tensor], attend: Attend, batch: AttentionBatch
    ) -> Tensor:
        with recording() as notes:
            hidden = self._model.between(*begin, attend, split=key[1])
        try:
            self._passes[key] = _Pass(notes.tape(), (*begin, batch.slots), hidden)
        except NotRecordable:
            self._passes[key] = None
        return hidden
