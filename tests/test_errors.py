"""Messages: they name the argument, what it got, and what would be right."""

import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from oracle import F32, MODE

import jax_xdna
from jax_xdna._primitive import gemm

A, B = jnp.ones((2, 3)), jnp.ones((4, 5))
NONE = ((), ())


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (
            lambda: jax_xdna.dot(A, B),
            ValueError,
            r"K differs: a has shape \(2, 3\) with 3 columns, b has shape \(4, 5\) with 4 rows",
        ),
        (lambda: jax_xdna.dot(A, jnp.ones(4)), ValueError, "with 4 elements"),
        (lambda: jax_xdna.dot(1.0, B), ValueError, "rank 1 or more"),
        (
            lambda: jax_xdna.dot(jnp.ones((2, 3, 4)), jnp.ones((5, 4, 3))),
            ValueError,
            r"batch dimensions \(2,\) of a and \(5,\) of b cannot be broadcast",
        ),
        (
            lambda: jax_xdna.dot_general(A, B, (((1,), (0,)), NONE)),
            ValueError,
            r"contracting dimensions 1 and 0 have sizes 3 and 4; lhs has shape \(2, 3\)",
        ),
        (
            lambda: jax_xdna.dot_general(A, B, (((1, 0), (0,)), NONE)),
            ValueError,
            "equally many contracting",
        ),
        (
            lambda: jax_xdna.dot_general(A, A, (((2,), (0,)), NONE)),
            ValueError,
            r"contracting dimensions \(2,\) do not exist in lhs",
        ),
        (
            lambda: jax_xdna.dot_general(A, A, (((0,), (0,)), ((0,), (0,)))),
            ValueError,
            "dimension of lhs is named twice",
        ),
        (
            lambda: jax_xdna.dot_general(A, A, (((1,), (1,)), NONE), "highest"),
            ValueError,
            "precision HIGHEST asks for more than bfloat16",
        ),
        (
            lambda: jax_xdna.dot(A, A.T, numerics="fp8"),
            ValueError,
            "numerics is 'fp8'; it must be one of bf16, bfp16",
        ),
        (
            lambda: jax_xdna.dot(A, A.T, rounding="up"),
            ValueError,
            "rounding is 'up'; it must be one of nearest, floor",
        ),
        (lambda: jax_xdna.offload(3), TypeError, "fn is 3; offload takes a function"),
        (lambda: jax_xdna.explain("f"), TypeError, "fn is 'f'; explain takes a function"),
        (lambda: jax_xdna.offload(jnp.matmul, numerics="fp8"), ValueError, "numerics is 'fp8'"),
    ],
)
def test_user_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(
    "shapes, change, kind, message",
    [
        (((2, 3), (4, 5)), {}, ValueError, r"K of a and b differ, 3 and 4; a has shape \(2, 3\)"),
        (((2, 2, 3), (3, 3, 5)), {}, ValueError, "the batch size of a and b differ, 2 and 3"),
        (
            ((2, 2, 2, 3), (2, 3, 5)),
            {},
            ValueError,
            "must have the same batch, or one of them none",
        ),
        (((3,), (3, 5)), {}, ValueError, r"a has shape \(3,\); it must have rank 2, or more"),
        (((2, 3), (3, 5)), {"layout": "XY"}, ValueError, "layout is 'XY'"),
        (((2, 3), (3, 5)), {"numerics": "x"}, ValueError, "numerics is 'x'"),
        (((2, 3), (3, 5)), {"out_dtype": jnp.int32}, TypeError, "out_dtype is int32"),
    ],
)
def test_the_primitive_checks_what_it_is_given(shapes, change, kind, message):
    operands = [jnp.ones(shape) for shape in shapes]
    for jit in (jax.jit, lambda f: f):
        with pytest.raises(kind, match=message):
            jit(lambda a, b: gemm(a, b, **{"layout": "NN", "out_dtype": F32, **MODE, **change}))(
                *operands
            )


def test_the_device_s_own_errors_reach_the_user_and_jax_stays_usable():
    # Past the checks above: a device lost between tracing and running.
    f = jax.jit(lambda a: gemm(a, a.T, layout="NN", out_dtype=F32, **{**MODE, "device": "xrt:9"}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE.*'xrt:9'.*emulated"):
        f(A).block_until_ready()

    def body(x, _):
        return gemm(x, x, layout="NN", out_dtype=F32, **{**MODE, "device": "xrt:9"}), None

    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        jax.block_until_ready(jax.jit(lambda x: jax.lax.scan(body, x, None, length=3))(jnp.eye(3)))
    assert float(jax_xdna.dot(A, A.T)[0, 0]) == 3


def run_python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


def test_the_compiled_part_s_absence_is_explained():
    run = run_python("import sys; sys.modules['jax_xdna._ffi'] = None; import jax_xdna")
    assert run.returncode and "pip install" in run.stderr and "jax_xdna._ffi" in run.stderr


def test_a_source_folder_uses_the_installed_compiled_part(tmp_path):
    package = pathlib.Path(jax_xdna._ffi.__file__).parent
    sources = pathlib.Path(jax_xdna.__file__).parent
    shutil.copytree(sources, tmp_path / "jax_xdna", ignore=shutil.ignore_patterns("_ffi*.so"))
    run = run_python(
        "import jax_xdna; print(jax_xdna.__file__); print(jax_xdna.devices()[0].name)",
        cwd=tmp_path,
        env={"PYTHONPATH": str(package.parent)},
    )
    assert run.stdout.split() == [str(tmp_path / "jax_xdna" / "__init__.py"), "emulated"], run
