"""Exceptions of the kernel: what is wrong and what to change, in one sentence each."""

from __future__ import annotations


class VerifyAttnError(Exception):
    """Base of everything `verify_attn` raises on purpose."""


class InputError(VerifyAttnError, ValueError):
    """A tensor or an option does not fit; the message names it and says what to change."""


class RefusedError(VerifyAttnError, RuntimeError):
    """The chosen variant cannot do this case; the message is the variant's own reason."""


class KernelBuildError(VerifyAttnError, RuntimeError):
    """A compiled object could not be made or loaded; the message carries the compiler's last lines."""


class KernelRunError(VerifyAttnError, RuntimeError):
    """A compiled kernel returned an error."""
