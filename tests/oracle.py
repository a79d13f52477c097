"""What a GEMM must give, from NumPy alone: the numerical contract, and a float64 reference."""

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
F32 = np.float32
SMALLEST_NORMAL = np.float32(2.0**-126)
MODE = {"numerics": "bf16", "rounding": "nearest", "device": "emulated"}
LAYOUTS = ("NN", "NT", "TN", "TT")


def flush(x):
    """Subnormals to zero of the same sign."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x).astype(F32)


def round_bf16(x, rounding="nearest"):
    """float32 → bfloat16, as float32 values."""
    near = np.asarray(x, F32).astype(BF16)
    if rounding == "floor":
        wide = near.astype(F32)
        lower = np.nextafter(near, BF16(-np.inf))
        near = np.where(wide > np.asarray(x, F32), lower, near)
    return near.astype(F32)


def _bfp16(x, rounding):
    """(…, K) → groups of 8 along K with one exponent and 8-bit mantissas."""
    k = x.shape[-1]
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], -k % 8), F32)], -1).astype(np.float64)
    groups = padded.reshape(*x.shape[:-1], -1, 8)
    largest = np.abs(groups).max(-1, keepdims=True)
    exponent = np.floor(np.log2(np.where(largest == 0, 1, largest)))
    unit = 2.0 ** (exponent - 6)
    whole = np.floor(groups / unit) if rounding == "floor" else np.rint(groups / unit)
    return np.where(largest == 0, 0, np.clip(whole, -128, 127) * unit)


def gemm(a, b, out=F32, numerics="bf16", rounding="nearest"):
    """C of the contract, bit for bit: a (M, K) · b (K, N) in order of k with fused multiply-add.

    A product of two bfloat16 is exact in float64, and so is rounding its sum with a float32 to
    float32 through float64.
    """
    a, b = (flush(round_bf16(np.asarray(x).astype(F32), rounding)) for x in (a, b))
    acc = np.zeros((a.shape[0], b.shape[1]), F32)
    with np.errstate(all="ignore"):
        if numerics == "bfp16":
            left, right = _bfp16(a, rounding), _bfp16(b.T, rounding)
            for g in range(left.shape[1]):
                acc = (acc.astype(np.float64) + left[:, g] @ right[:, g].T).astype(F32)
        else:
            a, b = a.astype(np.float64), b.astype(np.float64)
            for k in range(a.shape[1]):
                acc = flush((acc.astype(np.float64) + a[:, k : k + 1] * b[k]).astype(F32))
    return acc if out == F32 else round_bf16(acc, rounding).astype(BF16)


def stored(a, b, layout):
    """The operands a (…, M, K) and b (…, K, N) as this layout stores them."""
    return (
        np.swapaxes(a, -1, -2) if layout[0] == "T" else a,
        np.swapaxes(b, -1, -2) if layout[1] == "T" else b,
    )


def mass_error(got, a, b):
    """Error of `got` over the accumulated mass K · mean|a| · mean|b|, against float64."""
    a, b = (round_bf16(x).astype(np.float64) for x in (a, b))
    mass = a.shape[-1] * np.abs(a).mean() * np.abs(b).mean()
    return (np.asarray(got, np.float64) - a @ b) / mass


def same_bits(got, want):
    """Equal values, NaN equal to NaN, and equal dtypes."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))
