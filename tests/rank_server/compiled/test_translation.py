"""Translation: whatever a program calls is there, or is named."""

import pytest
from llvmlite import ir

from rank_server.compiled.emitter import F32, I32, Emitter
from rank_server.compiled.openmp import parallel
from rank_server.compiled.translation import UnresolvedSymbol, translate


def test_a_function_that_is_not_there_is_named():
    e = Emitter("lost")
    e.call("no_function_of_this_name", ir.VoidType(), e.function.args[0])
    with pytest.raises(UnresolvedSymbol, match="the program lost calls no_function_of_this_name: not in this process"):
        translate(e)


def test_a_function_that_an_operation_of_llvm_becomes_is_named(monkeypatch):
    """What LLVM calls for a logarithm is nowhere in its source."""
    e = Emitter("logarithm")
    e.store(e.intrinsic("log", e.load(e.function.args[0], F32)), e.function.args[0])
    monkeypatch.setattr("rank_server.compiled.translation.llvm.address_of_symbol", lambda name: None)
    with pytest.raises(UnresolvedSymbol, match="the program logarithm calls logf: "):
        translate(e)


@pytest.mark.skipif(parallel() is None, reason="torch has brought no OpenMP runtime")
def test_functions_of_this_process_and_operations_in_line_are_no_strangers():
    e = Emitter("known")
    number = e.load(e.function.args[0], F32)
    e.store(e.intrinsic("log", e.intrinsic("fmuladd", number, number, number)), e.function.args[0])
    e.call("omp_get_thread_num", I32)
    assert translate(e).address > 0
