"""The waste that the benchmark reports, what it moves, and its picture."""

import json
import xml.etree.ElementTree
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import pd_waste_move
from benchmarks.pd_waste import UNITS, main
from benchmarks.pd_waste_move import UNTOUCHED, Weighing
from cp_wire.errors import Internal
from kv_transfer.puller import Puller
from kv_transfer.store import ArrayStore

FRAMING = 77
"""Bytes of a message beside its payload, of 128 to 16383 bytes: 2 + 3·9 + 9·5 of the header, 1 + 2 before the payload."""
FIELDS = ("bytes", "messages", "wire_bytes")
SMALL = ["--bytes-per-token", "96", "--planes", "2", "--message-bytes", "1000", "--block-sizes", "16", "--cp", "4"]


def run(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_sixteen_tokens_over_four_shards(capsys):
    one, whole = run(
        capsys, "--tokens", "16", "--block-sizes", "16", "--cp", "4", "--bytes-per-token", "65536", "--move-mib", "0"
    )
    assert (one["interleave"], whole["interleave"]) == (1, 16)
    assert [one[unit]["waste"] for unit in UNITS] == [0.75, 0.75, 0]
    assert [whole[unit]["waste"] for unit in UNITS] == [0.75, 0, 0]
    assert (one["runs"], whole["runs"]) == (16, 1)
    framing = 4 * (FRAMING + 1)
    wanted = {"sent_tokens": 16, "waste": 0, "bytes": 1 << 20, "messages": 4, "wire_bytes": (1 << 20) + framing, "ms": None}
    assert one["token_exact"] == wanted
    assert whole["token_exact"]["messages"] == 1
    assert one["block_granular"]["messages"] == 4 and one["block_granular"]["bytes"] == 4 << 20


def test_hundred_tokens_over_eight_shards(capsys):
    one, whole = run(capsys, "--tokens", "100", "--block-sizes", "128", "--cp", "8", "--move-mib", "0")
    assert round(one["block_granular"]["waste"], 2) == 0.90
    assert round(whole["block_granular"]["waste"], 2) == 0.22


def test_what_is_counted_is_moved(capsys):
    rows = run(capsys, "--tokens", "16,70", *SMALL)
    found = {
        (row["interleave"], row["tokens"], unit): tuple(row[unit][field] for field in FIELDS) for row in rows for unit in UNITS
    }

    def traffic(payload: int, messages: int) -> tuple[int, int, int]:
        return payload, messages, payload + FRAMING * messages

    # A row has 48 bytes, a message 20 rows: one for the 8 of 4 tokens, two for the 32 to 36 of 16 to 18, four for the 64 of 32.
    assert found == {
        (1, 16, "virtual_block_granular"): traffic(64 * 96, 8),
        (1, 16, "block_granular"): traffic(64 * 96, 8),
        (1, 16, "token_exact"): traffic(16 * 96, 4),
        (1, 70, "virtual_block_granular"): traffic(128 * 96, 16),
        (1, 70, "block_granular"): traffic(128 * 96, 16),
        (1, 70, "token_exact"): traffic(70 * 96, 8),
        (16, 16, "virtual_block_granular"): traffic(64 * 96, 8),
        (16, 16, "block_granular"): traffic(16 * 96, 2),
        (16, 16, "token_exact"): traffic(16 * 96, 2),
        (16, 70, "virtual_block_granular"): traffic(128 * 96, 16),
        (16, 70, "block_granular"): traffic(80 * 96, 10),
        (16, 70, "token_exact"): traffic(70 * 96, 9),
    }
    assert all(row[unit]["ms"]["min"] > 0 for row in rows for unit in UNITS)


def test_what_is_no_range_of_tokens_or_too_large_is_only_counted(capsys):
    one, whole = run(capsys, "--tokens", "1", *SMALL, "--runs", "1")
    assert [one[unit]["ms"] is None for unit in UNITS] == [False, True, False]
    assert [whole[unit]["ms"] is None for unit in UNITS] == [False, False, False]
    # 64 tokens of 49152 bytes are 3 MiB.
    words = ["--tokens", "1", "--block-sizes", "16", "--cp", "4", "--move-mib", "3", "--runs", "1"]
    for bytes_per_token, moved in ((49152, True), (49153, False)):
        rows = run(capsys, *words, "--bytes-per-token", str(bytes_per_token))
        assert [row["token_exact"]["ms"] is not None for row in rows] == [moved, moved]


class Short(Puller):
    """Leaves the last token out."""

    async def pull(self, pull, deadline_s=None):
        return await super().pull(replace(pull, end=pull.end - 1), deadline_s)


class Twice(Weighing):
    """Sends every message twice."""

    async def send(self, frame, context):
        await super().send(frame, context)
        await super().send(frame, context)


class Silent(Weighing):
    """Sends nothing."""

    async def send(self, frame, context):
        pass


@pytest.mark.parametrize(
    ("stand_in", "moved"),
    [
        (Short, "1440 bytes in 2 messages, 1594 bytes on the wire"),
        (Twice, "1536 bytes in 2 messages, 3380 bytes on the wire"),
    ],
)
def test_moving_anything_but_what_was_counted_fails(stand_in, moved, monkeypatch):
    monkeypatch.setattr(pd_waste_move, stand_in.__mro__[1].__name__, stand_in)
    with pytest.raises(Internal) as failed:
        main([*SMALL, "--cp", "1", "--tokens", "16", "--runs", "1"])
    assert str(failed.value).endswith(f"counted 1536 bytes in 2 messages, 1690 bytes on the wire, moved {moved}")


class Spoiling(ArrayStore):
    """Writes other bytes than it is given."""

    def write(self, picked, rows, data):
        super().write(picked, rows, data ^ 1)


class Straying(ArrayStore):
    """Writes to a slot that it is not asked for, too, while there is one left."""

    def write(self, picked, rows, data):
        super().write(picked, rows, data)
        self._data[np.flatnonzero(self._data == UNTOUCHED)[-1:]] = 0


@pytest.mark.parametrize(("stand_in", "end"), [(Spoiling, 16), (Straying, 1)])
def test_a_pool_that_holds_anything_but_the_tokens_fails(stand_in, end, monkeypatch):
    """Sixteen tokens come first, a virtual block, and leave no slot to stray into; then one."""
    monkeypatch.setattr(pd_waste_move, "ArrayStore", stand_in)
    with pytest.raises(Internal, match=rf"tokens \[0, {end}\) .* the target's pool holds something else"):
        main([*SMALL, "--cp", "1", "--interleaves", "16", "--tokens", "1", "--runs", "1"])


def test_a_pull_that_fails_is_the_end(monkeypatch):
    monkeypatch.setattr(pd_waste_move, "Weighing", Silent)
    with pytest.raises(Internal, match="messages were damaged or lost"):
        main([*SMALL, "--tokens", "16", "--runs", "1"])


def test_an_interleave_is_left_out_where_it_does_not_divide_the_block(capsys):
    rows = run(capsys, "--tokens", "9", "--block-sizes", "4,6", "--cp", "1,2", "--interleaves", "3", "--move-mib", "0")
    assert [(row["block_size"], row["cp"], row["interleave"]) for row in rows] == [(4, 1, 4), (6, 1, 6), (6, 2, 3)]


def test_summary_and_picture(capsys, tmp_path):
    picture = tmp_path / "waste.svg"
    assert main(["--tokens", "16,64", "--block-sizes", "16", "--cp", "4", "--plot", str(picture)]) == 0
    head, _, _, columns, *body = capsys.readouterr().out.splitlines()
    assert head.startswith("23040 bytes per token") and columns.split()[:5] == ["tokens", "block", "cp", "I", "runs"]
    assert len(body) == 4 and "75.0%" in body[0]
    assert [line.split()[:5] + line.split()[5::4] for line in body] == [
        ["16", "16", "4", "1", "16", "75.0%", "75.0%", "0.0%"],
        ["64", "16", "4", "1", "64", "0.0%", "0.0%", "0.0%"],
        ["16", "16", "4", "16", "1", "75.0%", "0.0%", "0.0%"],
        ["64", "16", "4", "16", "4", "0.0%", "0.0%", "0.0%"],
    ]
    text = "".join(xml.etree.ElementTree.parse(picture).getroot().itertext())
    assert "blocks, I 1, cp 4" in text and "blocks, I = B, any cp" in text and "tokens, any layout" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "0"], "0 is outside [1,"),
        (["--cp", "0"], "0 is outside [1,"),
        (["--block-sizes", "x"], "'x' is not a whole number"),
        (["--message-bytes", "2097153"], "2097153 is outside [1, 2097152]"),
        (["--tokens", "1,4194305"], "4194305 is outside [1, 4194304]"),
        (
            ["--cp", "4", "--block-sizes", "16,32", "--interleaves", "3,5"],
            "no number of --interleaves 3,5 divides one of --block-sizes 16,32",
        ),
        (
            # Two more bytes say the length of such a payload: 8 MiB + 1 less FRAMING + 2, twice.
            ["--bytes-per-token", "16777060", "--planes", "2"],
            "--bytes-per-token 16777060 in --planes 2 makes messages of 8388609 bytes: a connection carries 8388608 ",
        ),
    ],
)
def test_refusals(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


def test_one_shard_wastes_the_rest_of_its_last_block(tmp_path):
    picture = tmp_path / "waste.svg"
    assert main(["--tokens", "16,100", "--cp", "1", "--block-sizes", "16", "--move-mib", "0", "--plot", str(picture)]) == 0
    text = "".join(xml.etree.ElementTree.parse(picture).getroot().itertext())
    assert "blocks, I = B, any cp" in text and "tokens, any layout" in text and "blocks, I 16" not in text


def test_messages_of_the_largest_row_arrive_and_are_told(capsys):
    words = ["--tokens", "1", "--cp", "1", "--block-sizes", "1", "--planes", "1", "--runs", "1"]
    assert main([*words, "--bytes-per-token", "8388529"]) == 0
    head, *_, row = capsys.readouterr().out.splitlines()
    assert head.endswith("in messages of at most 1048576 bytes, but of a row of 8388529 at least")
    assert row.split()[-1] != "–"
    assert main([*words, "--bytes-per-token", "1048576"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("in messages of at most 1048576 bytes")


def test_rows_of_unequal_size_are_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--bytes-per-token", "100", "--planes", "7"])
    assert stopped.value.code == 2 and "100 is not a multiple of --planes 7" in capsys.readouterr().err


def test_one_row_is_one_and_a_waste_of_nearly_all_is_not_all(capsys):
    words = ["--move-mib", "0", "--cp", "1", "--block-sizes", "50000", "--tokens", "1", "--bytes-per-token", "1"]
    assert main(words) == 0
    head, *_, row = capsys.readouterr().out.splitlines()
    assert head.startswith("1 byte per token, 1 row each, in messages of at most 1048576 bytes")
    assert row.split()[5] == "99.998%" and row.split()[13] == "0.0%"
