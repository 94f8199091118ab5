"""The C ABI of csrc/verify_attn.h in ctypes, filled in from a checked `Problem`."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from verify_attn.errors import KernelBuildError, KernelRunError, RefusedError
from verify_attn.problem import DTYPES, Problem

ABI = 1


class Params(ctypes.Structure):
    """`verify_attn_params`, field by field in the header's order."""

    _fields_ = [
        ("abi", c_uint32),
        ("dtype", c_int32),
        ("streams", c_int32), ("tokens", c_int32), ("heads", c_int32),
        ("max_q", c_int32),
        ("max_prefix", c_int32),
        ("latent_dim", c_int32), ("rope_dim", c_int32),
        ("page_size", c_int32),
        ("mask_kind", c_int32), ("mask_words", c_int32),
        ("index64", c_int32),
        ("num_splits", c_int32),
        ("chunk", c_int32),
        ("threads", c_int32),
        ("scale", c_float),
        ("q", c_void_p),
        ("kv_pool", c_void_p),
        ("kv_row_stride", c_int64),
        ("draft_kv", c_void_p),
        ("draft_row_stride", c_int64),
        ("draft_slots", c_void_p),
        ("qo_indptr", c_void_p),
        ("kv_indptr", c_void_p),
        ("kv_indices", c_void_p),
        ("prefix_lens", c_void_p),
        ("mask", c_void_p),
        ("mask_indptr", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_int64),
        ("stream", c_void_p),
    ]


# Tensors of a Problem whose addresses the parameters hold, under the same names.
TENSORS = ("q", "kv_pool", "draft_kv", "draft_slots", "qo_indptr", "kv_indptr", "kv_indices", "prefix_lens", "mask", "mask_indptr", "out", "lse")


def params_of(p: Problem, *, num_splits: int = 0, threads: int = 0, stream: int = 0) -> Params:
    """The C parameters of a problem. The problem's tensors must outlive every use of them.

    Args:
        num_splits: KV splits; 0 lets the variant choose.
        threads: CPU worker threads; 0 = all.
        stream: cudaStream_t as an integer (`torch.cuda.current_stream().cuda_stream`).
    """
    return Params(
        abi=ABI, dtype=DTYPES[p.q.dtype], streams=p.streams, tokens=p.tokens, heads=p.heads, max_q=p.max_q,
        max_prefix=p.max_prefix, latent_dim=p.latent_dim, rope_dim=p.rope_dim, page_size=p.page_size,
        mask_kind=int(p.mask_kind), mask_words=p.mask_words, index64=int(p.qo_indptr.dtype == torch.int64),
        num_splits=num_splits, chunk=p.chunk, threads=threads, scale=p.scale,
        q=p.q.data_ptr(), kv_pool=p.kv_pool.data_ptr(), kv_row_stride=p.kv_pool.stride(0),
        draft_kv=_pointer(p.draft_kv), draft_row_stride=p.draft_kv.stride(0) if p.draft_kv is not None else 0,
        draft_slots=_pointer(p.draft_slots), qo_indptr=p.qo_indptr.data_ptr(), kv_indptr=p.kv_indptr.data_ptr(),
        kv_indices=p.kv_indices.data_ptr(), prefix_lens=p.prefix_lens.data_ptr(), mask=_pointer(p.mask),
        mask_indptr=_pointer(p.mask_indptr), out=p.out.data_ptr(), lse=p.lse.data_ptr(), workspace=None,
        workspace_bytes=0, stream=stream or None)


class Variant:
    """The three functions a variant exports from a loaded shared object.

    Args:
        library: a loaded object (`open_library`).
        symbol: the `<v>` of `verify_attn_<v>_run`.
    """

    def __init__(self, library: ctypes.CDLL, symbol: str) -> None:
        self.symbol, self._library = symbol, library
        self._workspace = self._function("workspace", c_int64)
        self._refuse = self._function("refuse", c_char_p)
        self._run = self._function("run", c_int)
        self._error = library.verify_attn_error
        self._error.restype, self._error.argtypes = c_char_p, []

    def _function(self, what: str, result):
        name = f"verify_attn_{self.symbol}_{what}"
        try:
            function = getattr(self._library, name)
        except AttributeError as missing:
            raise KernelBuildError(f"{self._library._name} does not export {name}; the object was built from other "
                                   "sources, remove it from the build cache") from missing
        function.restype, function.argtypes = result, [ctypes.POINTER(Params)]
        return function

    def refuse(self, params: Params) -> str:
        """The variant's reason for not doing this, or an empty string."""
        reason = self._refuse(params)
        return reason.decode() if reason else ""

    def workspace_bytes(self, params: Params) -> int:
        """Bytes of workspace it needs; depends only on fields known on the host."""
        return int(self._workspace(params))

    def run(self, params: Params, workspace: Tensor | None = None) -> None:
        """Runs it; on CUDA this only enqueues.

        Raises:
            RefusedError: with the variant's reason.
            KernelRunError: with the kernel's error text.
        """
        reason = self.refuse(params)
        if reason:
            raise RefusedError(f"{self.symbol}: {reason}")
        if workspace is not None:
            params.workspace, params.workspace_bytes = workspace.data_ptr(), workspace.nbytes
        self.launch(params)

    def launch(self, params: Params) -> None:
        """Runs it without asking whether it refuses.

        Raises:
            KernelRunError: with the kernel's error text.
        """
        status = self._run(params)
        if status != 0:
            raise KernelRunError(f"{self.symbol} failed ({status}): {self._error().decode()}")


def open_library(path: Path) -> ctypes.CDLL:
    """Loads a shared object with its symbols kept to itself.

    Raises:
        KernelBuildError: with the loader's message.
    """
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise KernelBuildError(f"cannot load {path}: {error}") from error


def _pointer(tensor: Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None
