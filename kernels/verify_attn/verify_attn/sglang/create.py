"""Make the backend a server asked for, or refuse the server with the reason."""

from __future__ import annotations

import torch

from verify_attn.sglang import NAME, TORCH_NAME
from verify_attn.sglang.requirements import read_configuration, require

CPU_DTYPES = ("float32", "bfloat16", "float16")
CUDA_DTYPES = ("bfloat16", "float16")


def create_backend(name: str, runner):
    """The attention backend of one model runner.

    Raises:
        UnsupportedError: the configuration cannot be served; SGLang's scheduler ends with it and so does the server.
    """
    on_cuda = torch.cuda.is_available()
    require(read_configuration(runner), CUDA_DTYPES if on_cuda else CPU_DTYPES)
    if on_cuda and runner.is_draft_worker:  # a draft model verifies nothing
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        return TritonAttnBackend(runner)
    if on_cuda:
        from verify_attn.sglang.cuda_backend import CudaBackend

        return CudaBackend(runner)
    if name == TORCH_NAME or runner.is_draft_worker:
        from verify_attn.sglang.torch_backend import TorchBackend

        return TorchBackend(runner, name)
    from verify_attn.sglang.cpu_backend import CpuBackend

    return CpuBackend(runner, NAME)
