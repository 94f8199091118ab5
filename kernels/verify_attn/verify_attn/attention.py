"""The one Python entry: `verify_attention`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from verify_attn import cpu, naive
from verify_attn.errors import InputError
from verify_attn.problem import Problem, make_problem

CPU_VARIANTS = ("naive", "torch_gemm", "cpu")
CUDA_VARIANTS = ("naive", "torch_gemm", "cuda_naive", "per_head", "tensor_core", "hopper", "hopper_rows")


def verify_attention(
    q: Tensor,
    kv_pool: Tensor,
    *,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    prefix_lens: Tensor,
    page_size: int = 1,
    draft_kv: Tensor | None = None,
    draft_slots: Tensor | None = None,
    mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    mask_layout: str = "auto",
    scale: float,
    latent_dim: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    variant: str = "auto",
    num_splits: int = 0,
    chunk: int = 0,
    workspace: Tensor | None = None,
    max_q: int | None = None,
    max_prefix: int | None = None,
    threads: int = 0,
    check_values: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Tree-verify attention in MLA's absorbed form.

    Stream b's draft-tree queries are rows qo_indptr[b]..qo_indptr[b+1] of `q`. Each sees the stream's whole prefix and
    the draft rows its mask row allows. All heads share one KV row, whose first `latent_dim` elements are the value.

    Args:
        q: [tokens, heads, latent + rope], float32, bfloat16 or float16, contiguous.
        kv_pool: [slots, row] or [slots, 1, row], q's dtype; rows may be strided.
        qo_indptr: [streams + 1]; rows past its last element are padding and are not touched.
        kv_indptr: [streams + 1], counts pages in `kv_indices`.
        kv_indices: page numbers; entries past the last used one may be anything.
        prefix_lens: [streams], keys in the prefix, 0 for none.
        page_size: keys a page; key i lives in slot page[i // page_size] * page_size + i % page_size.
        draft_kv: [tokens, row] or [tokens, 1, row], the draft rows beside the pool; or
        draft_slots: [tokens], their slots in the pool. Exactly one of both.
        mask: which draft rows a row sees: int32 bits [tokens, words]; bool/uint8 [streams, q, q], of which a stream with fewer
            queries means the first rows and columns; or flat bool/uint8 with `mask_indptr` and `mask_layout`. None: a chain,
            each row sees itself and those before.
        mask_indptr: [streams + 1], element offsets of a flat mask.
        mask_layout: of a flat mask: `qlen` (q×q a stream) or `full` (SGLang's q×(prefix + q)); else `auto`.
        scale: multiplies q·kv.
        latent_dim: default 512 for rows of 576, else from `out`, else the row less 16.
        out, lse: written in place when given: [tokens, heads, latent] of q's dtype, [tokens, heads] float32.
        variant: `auto` or one of the variants of q's device (see README).
        num_splits: KV splits; 0 = the variant chooses.
        chunk: keys a split, fixed: a row's bits then do not depend on who shares its batch; 0 = off.
        workspace: CUDA: zeroed once by the caller, of at least `cuda.workspace_bytes`; needed under CUDA graphs. One serves any calls in turn.
        max_q, max_prefix: bounds on the queries a stream and the prefix; needed under CUDA graphs, else looked up.
        threads: CPU worker threads; 0 = torch.get_num_threads().
        check_values: look inside index tensors too; default on the CPU yes, on a GPU no.

    Returns:
        out [tokens, heads, latent] and lse [tokens, heads] (natural log). A row that sees nothing gives 0 and -inf.

    Raises:
        InputError: a tensor or option does not fit; says what to change.
        RefusedError: the variant cannot do this case; its own reason.
        KernelBuildError, KernelRunError: the compiled kernel could not be made, loaded or run.
    """
    p = make_problem(
        q, kv_pool, qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, prefix_lens=prefix_lens,
        page_size=page_size, draft_kv=draft_kv, draft_slots=draft_slots, mask=mask, mask_indptr=mask_indptr,
        mask_layout=mask_layout, scale=scale, latent_dim=latent_dim, out=out, lse=lse, max_q=max_q, max_prefix=max_prefix,
        chunk=chunk, check_values=check_values)
    run_problem(p, variant, num_splits=num_splits, threads=threads, workspace=workspace)
    return p.out, p.lse


def run_problem(p: Problem, variant: str = "auto", *, num_splits: int = 0, threads: int = 0, workspace: Tensor | None = None) -> None:
    """Runs a variant on a checked problem, filling p.out and p.lse."""
    device = p.q.device.type
    known = CPU_VARIANTS if device == "cpu" else CUDA_VARIANTS if device == "cuda" else ()
    if variant != "auto" and variant not in known:
        raise InputError(f"variant {variant!r} does not run on {device}; there: {', '.join(known) or 'none'}, or auto")
    plain: dict[str, Callable[[Problem], None]] = {"naive": naive.naive, "torch_gemm": naive.torch_gemm}
    if variant in plain:
        plain[variant](p)
    elif device == "cpu":
        cpu.run(p, num_splits=num_splits, threads=threads)
    elif device == "cuda":
        from verify_attn import cuda  # loads the CUDA objects, which a machine without a GPU does not have

        cuda.run(p, variant, num_splits=num_splits, workspace=workspace)
    else:
        raise InputError(f"q is on {p.q.device}; there are kernels for cpu and cuda")
