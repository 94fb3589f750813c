"""From a finished program to machine code for this processor, all of whose calls lead somewhere."""

from collections.abc import Iterator
from dataclasses import dataclass

import llvmlite.binding as llvm
import numpy as np

from rank_server.compiled.emitter import Emitter

_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")],
)
"""An entry of a symbol table in 64-bit ELF; section 0 is where those are that an object does not define."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code of a function of one address."""

    address: int
    """Valid as long as this object lives."""
    engine: llvm.ExecutionEngine


class UnresolvedSymbol(RuntimeError):
    """A program calls what this process does not have; names the functions."""


def translate(emitter: Emitter) -> Compiled:
    """Machine code for this processor; raises UnresolvedSymbol, as the call of such a function would be one of address 0."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    module = llvm.parse_assembly(emitter.source())
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    objects: list[bytes] = []
    engine.set_object_cache(lambda _, code: objects.append(code), lambda _: None)
    engine.finalize_object()
    missing = [name for name in _called(objects.pop()) if not llvm.address_of_symbol(name)]
    if missing:
        raise UnresolvedSymbol(f"the program {emitter.function.name} calls {', '.join(missing)}: not in this process")
    return Compiled(engine.get_function_address(emitter.function.name), engine)


def _called(code: bytes) -> Iterator[str]:
    """What an object file does not define, functions that LLVM calls by itself too; nothing where it is no ELF file."""
    sections = {section.name(): section.data() for section in llvm.ObjectFileRef.from_data(code).sections()}
    names = sections.get(b".strtab", b"")
    for symbol in np.frombuffer(sections.get(b".symtab", b""), _SYMBOL):
        start = int(symbol["name"])
        if symbol["section"] == 0 and start:
            yield names[start : names.index(b"\0", start)].decode()
