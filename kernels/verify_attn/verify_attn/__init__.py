"""verify_attn: tree-verify MLA attention for speculative decoding, on the CPU and on CUDA.

    from verify_attn import verify_attention
"""

from verify_attn.attention import verify_attention
from verify_attn.errors import InputError, KernelBuildError, KernelRunError, RefusedError, VerifyAttnError

__all__ = ["InputError", "KernelBuildError", "KernelRunError", "RefusedError", "VerifyAttnError", "verify_attention"]
