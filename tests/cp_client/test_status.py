"""`kvloom status` against a scripted server: its document and its table."""

import json

from cp_client.cli import main
from cp_client.plain import plain
from cp_wire.pb import common_pb2
from cp_wire.pb import coordinator_pb2 as pb


def status_message():
    config = common_pb2.ClusterConfig(tp=1, pcp=2, dcp=2, dp=1, merge=common_pb2.MERGE_AG_RS, model_name="fox")
    rank = pb.RankStatus(
        rank=1,
        role="mixed",
        state="lost",
        instance="ab",
        pid=77,
        kv_blocks_total=2**40,
        kv_blocks_free=3,
        fenced_reason="frozen",
    )
    groups = [pb.GroupStatus(name="dcp:0", ranks=[0, 1], epoch=2)]
    return pb.GetStatusResponse(ranks=[rank], groups=groups, running=1, waiting=2, config=config, state="degraded")


def test_status_document(fake, target, capsys):
    fake.status = status_message()
    assert main(["status", "--target", target, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rank = document["ranks"][0]
    assert (rank["rank"], rank["role"], rank["state"], rank["instance"], rank["pid"]) == (1, "mixed", "lost", "ab", 77)
    assert (rank["kv_blocks_total"], rank["kv_blocks_free"], rank["last_progress_ms"]) == (2**40, 3, 0)
    assert document["groups"] == [{"name": "dcp:0", "ranks": [0, 1], "epoch": 2}]
    assert (document["running"], document["waiting"]) == (1, 2)
    assert (document["config"]["pcp"], document["config"]["merge"]) == (2, "ag_rs")


def test_status_table(fake, target, capsys):
    fake.status = status_message()
    fake.status.config.model_name = "fox [7b]"
    fake.status.ranks[0].fenced_reason = "frozen: [two] of 3 peers waited for it in vain"
    fake.status.ranks[0].address = "a-host-with-a-long-name.in.a.long.domain:50123"
    assert main(["status", "--target", target]) == 0
    out = capsys.readouterr().out
    assert "fox [7b] degraded: tp 1, pcp 2, dcp 2, dp 1; 1 running, 2 waiting" in out
    row = next(line for line in out.splitlines() if "frozen" in line)
    assert "lost (frozen: [two] of 3 peers waited for it in vain)" in row and "3 / 1099511627776" in row
    assert "a-host-with-a-long-name.in.a.long.domain:50123" in row


def test_status_says_the_shape_of_each_side(fake, target, capsys):
    fake.status = status_message()
    for role, pcp in (("prefill", 4), ("decode", 2)):
        fake.status.sides.add(role=role, config=common_pb2.ClusterConfig(tp=1, pcp=pcp, dcp=pcp, dp=1))
    assert main(["status", "--target", target]) == 0
    assert "degraded: prefill tp 1, pcp 4, dcp 4, dp 1; decode tp 1, pcp 2, dcp 2, dp 1; 1 running" in capsys.readouterr().out


def test_status_says_how_steps_were_computed_and_what_a_link_costs(fake, target, capsys):
    fake.status = status_message()
    owner, split = common_pb2.DECODE_MODE_OWNER, common_pb2.DECODE_MODE_SPLIT
    fake.status.step_counts.add(decode_mode=owner, gather=common_pb2.GATHER_KV, steps=3)
    fake.status.step_counts.add(decode_mode=split, gather=common_pb2.GATHER_NONE, steps=20)
    fake.status.links.add(
        group="dcp:0", measured_latency_us=48.8, measured_bytes_per_s=1.6e9, latency_us=57.3, bytes_per_s=1.5e9
    )
    assert main(["status", "--target", target]) == 0
    out = capsys.readouterr().out
    assert "steps: owner gathering kv 3, split 20" in out
    assert "link dcp:0: 57 µs, 1.50 GB/s (measured at the start: 49 µs, 1.60 GB/s)" in out
    assert main(["status", "--target", target, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step_counts"][0] == {"decode_mode": "owner", "gather": "kv", "steps": 3}
    assert document["links"][0]["measured_latency_us"] == 48.8


def test_status_says_what_moved_between_the_sides(fake, target, capsys):
    fake.status = status_message()
    transfers = fake.status.transfers
    transfers.requests, transfers.ranges, transfers.messages, transfers.payload_bytes, transfers.seconds = (
        3,
        7,
        12,
        4_200_000,
        0.31,
    )
    assert main(["status", "--target", target]) == 0
    assert "KV moved for 3 requests: 4.2 MB in 12 messages, 0.3 s\n" in capsys.readouterr().out
    transfers.recomputed.add(cause="UNAVAILABLE", requests=2)
    transfers.failed.add(cause="CORRUPTED", requests=1)
    assert main(["status", "--target", target]) == 0
    assert "0.3 s; recomputed after UNAVAILABLE 2; failed after CORRUPTED 1" in capsys.readouterr().out
    assert main(["status", "--target", target, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["transfers"]["recomputed"] == [{"cause": "UNAVAILABLE", "requests": 2}]


def test_an_unset_enum_is_said_so():
    assert plain(common_pb2.ClusterConfig())["merge"] == "unspecified"
