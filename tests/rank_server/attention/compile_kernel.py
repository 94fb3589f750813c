"""Compiles the decode kernel for compute capability 9.0 and prints the bytes of shared memory that it takes.

Argument: element type of queries and caches in Triton's words.
"""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rank_server.attention.triton_decode import KEY_TILE, _decode

SIZES = {"SHARE": 32, "SHARE_PADDED": 32, "HEAD_DIM": 128, "DIM_PADDED": 128, "BLOCK_SIZE": 16, "TILE": KEY_TILE}


def main(element: str) -> None:
    types = dict.fromkeys(_decode.arg_names, "i32") | dict.fromkeys(SIZES, "constexpr")
    types |= {"q_at": f"*{element}", "k_at": f"*{element}", "v_at": f"*{element}", "scale": "fp32"}
    types |= {"tables_at": "*i64", "lens_at": "*i64", "out_at": "*fp32", "lse_at": "*fp32"}
    source = ASTSource(fn=_decode, signature=types, constexprs=SIZES)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).metadata.shared)


if __name__ == "__main__":
    main(sys.argv[1])
