"""Memory of the host that asks for huge pages."""

from pathlib import Path

import pytest

from rank_server.huge_pages import HUGE_PAGE_BYTES, host_zeros


def flags_of(address: int) -> list[str]:
    """What the kernel was told of the memory there."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            first, last = (int(end, 16) for end in name.split("-"))
            inside = first <= address < last
        elif inside and name == "VmFlags:":
            return rest
    raise AssertionError(f"nothing lies at {address:#x}")


@pytest.mark.parametrize("size", [1, 4096, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 17])
def test_zeros_of_the_size_begin_with_a_page(size):
    memory = host_zeros(size)
    assert memory.shape == (size,) and not memory.any()
    assert memory.data_ptr() % HUGE_PAGE_BYTES == 0
    memory.fill_(7)
    assert memory.eq(7).all()


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="the kernel has no transparent huge pages"
)
def test_it_asks_for_huge_pages():
    memory = host_zeros(HUGE_PAGE_BYTES)
    assert "hg" in flags_of(memory.data_ptr())


def test_pieces_outlive_the_whole():
    piece = host_zeros(HUGE_PAGE_BYTES)[100:200]
    piece.fill_(3)
    assert piece.eq(3).all()


def test_more_than_there_is_is_no_memory():
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes of host memory"):
        host_zeros(1 << 60)
