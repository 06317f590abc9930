"""Runs Triton kernels on a CPU, in Triton's interpreter, behind the library's own wrappers.

`Interpreter().triton_call` takes the place of `kernels.gpu.triton_call.triton_call`, so that a test
covers a wrapper's padding, scales, grid and constants as well as the kernel. The kernels run in a
process of their own (this file as a program), because TRITON_INTERPRET must be set before Triton is
imported. The buffers of results hold NaN beforehand: what a kernel forgets to write is seen.

It has no inline assembly: `_Unpacked` does what that of vectors.py does. Two of the
interpreter's operations are replaced. Its products take bf16's bits for integers, and
numpy's matmul gives a row other bits at another place in a tile, which no tensor core does: `_dot`.
Its conversions between float types cut off where a GPU rounds and know no NaN in FP8: `_convert`,
which follows the PTX instructions that the kernels compile to (`cvt.rn`, with `.satfinite` for
FP8); test_sass.py finds them there.
"""

import importlib
import os
import pickle
import struct
import subprocess
import sys
import threading

import numpy as np

_NAMES = {
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "uint8": "u8",
    "uint16": "u16",
}


def _send(stream, value) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream):
    header = stream.read(8)
    return pickle.loads(stream.read(struct.unpack("<Q", header)[0])) if header else None


class Interpreter:
    """A process that interprets kernels, one call after another."""

    def __init__(self):
        """Skips the test where Triton's interpreter and numpy do not go together."""
        import pytest
        import triton

        release = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if release < (3, 9) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
            pytest.skip(f"Triton {triton.__version__} interprets with numpy before 2.4 alone")
        self._turn = threading.Lock()  # XLA may call back from several threads at once
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=600)

    def run(self, kernel, grid, arrays, outs, constants, in_place=0):
        """The arrays that the kernel writes, given (shape, dtype) of each, and the last `in_place`
        of `arrays`.

        Raises AssertionError with what the other process said.
        """
        place = (kernel.fn.__module__, kernel.fn.__name__)
        with self._turn:
            _send(self._process.stdin, (*place, grid, arrays, outs, constants, in_place))
            answer = _receive(self._process.stdout)
        assert not isinstance(answer, str), answer
        return answer

    def triton_call(
        self, kernel, *arrays, out, grid, warps, stages, in_place=0, registers=None, **constants
    ):
        """Signature and result of `kernels.gpu.triton_call.triton_call`."""
        import jax

        from fp8rl_jax.kernels.gpu.triton_call import shapes_of, with_placeholders

        del warps, stages, registers
        written = arrays[len(arrays) - in_place :]
        results = [*out, *shapes_of(written)]
        shapes = with_placeholders(results, jax.ShapeDtypeStruct((1,), np.float32))

        def call(*arrays):
            arrays = [np.ascontiguousarray(x) for x in arrays]
            outs = [(x.shape, np.dtype(x.dtype)) for x in shapes[: len(out)]]
            return tuple(self.run(kernel, grid, arrays, outs, constants, in_place))

        operands = with_placeholders(arrays, np.zeros(1, np.float32))
        found = jax.pure_callback(call, tuple(shapes), *operands)
        return tuple(None if shape is None else x for shape, x in zip(results, found, strict=True))


class _Type(str):
    """A dtype under Triton's name for it."""


class _Tensor:
    """What the interpreter asks of a torch tensor."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = _Type(_NAMES[str(array.dtype)])

    def data_ptr(self):
        return self.array.ctypes.data

    def element_size(self):
        return self.array.itemsize

    def size(self):
        return self.array.shape

    def storage_offset(self):
        return 0

    # On a GPU the interpreter would copy to the host and back; these arrays are there already.
    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def stride(self):
        return None

    def new_empty(self, *_, **__):
        return self

    def set_(self, *_):
        return self

    def copy_(self, _):
        return self


def _convert(bits: np.ndarray, source, target, rounding) -> np.ndarray:
    """Bits of a float type as those of another: to nearest even, FP8 saturating, NaN stays NaN."""
    import ml_dtypes

    assert rounding is None or rounding.name == "RTNE", rounding
    types = {short: np.dtype(name) for name, short in _NAMES.items()}
    value = np.ascontiguousarray(bits).view(types[str(source)])
    target = types[str(target)]
    with np.errstate(over="ignore"):
        if target.itemsize == 1:
            largest = float(ml_dtypes.finfo(target).max)
            value = np.clip(value.astype(np.float32), -largest, largest)
        return value.astype(target).view(f"u{target.itemsize}")


def _widened(handle) -> np.ndarray:
    """The values of an interpreter's tensor, which keeps some float types as integers."""
    dtype = str(handle.dtype.scalar)
    types = {short: np.dtype(name) for name, short in _NAMES.items()}
    return np.ascontiguousarray(handle.data).view(types[dtype]).astype(np.float32)


def _dot(builder, a, b, d, *_precision):
    """A product whose rows do not see each other: numpy's own takes other orders by place. It goes
    on where the sum so far ends, as a tensor core does: how long a step is changes no bit."""
    from triton.runtime.interpreter import TensorHandle

    left, right = _widened(a), _widened(b)
    total = np.array(d.data, np.float32)
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k, :]
    return TensorHandle(total, d.dtype.scalar)


class _Unpacked:
    """Two E4M3 or INT8 in each int16, as float16: what `kernels.gpu.vectors._unpacked` and
    `_unpacked_integers` write in PTX."""

    def __init__(self, asm: str, pairs):
        import ml_dtypes

        number = ml_dtypes.float8_e4m3fn
        if "0x64646464" in asm:
            assert asm.count("sub.rn.f16x2") == 2 and "0x4240" in asm and "0x4341" in asm, asm
            number = np.int8
        else:
            assert asm.count("cvt.rn.f16x2.e4m3x2") == 2 and "0x3120" in asm, asm
        codes = np.ascontiguousarray(pairs.data).view(np.uint16)
        halves = (codes & 255).astype(np.uint8), (codes >> 8).astype(np.uint8)
        self._values = [x.view(number).astype(np.float16) for x in halves]

    def get_result(self, index: int):
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        return TensorHandle(self._values[index], tl.float16)


def _unwritten(shape, dtype) -> np.ndarray:
    return np.full(shape, 1 if dtype.kind in "iu" else np.nan, dtype)


def _serve(requests, answers) -> None:
    import ml_dtypes  # noqa: F401  (numpy's FP8 types)
    import triton.runtime.interpreter

    triton.runtime.interpreter._convert_float = _convert
    builder = triton.runtime.interpreter.InterpreterBuilder
    builder.create_dot = _dot
    builder.create_inline_asm = lambda self, asm, _, operands, *more: _Unpacked(asm, operands[0])
    while (request := _receive(requests)) is not None:
        module, name, grid, arrays, shapes, constants, in_place = request
        try:
            outs = [_unwritten(shape, dtype) for shape, dtype in shapes]
            arrays = [np.array(x) for x in arrays]
            written = arrays[len(arrays) - in_place :]
            kernel = getattr(importlib.import_module(module), name)
            kernel[grid](*(_Tensor(x) for x in (*arrays, *outs, *written)), **constants)
            _send(answers, [*outs, *written])
        except Exception as error:
            _send(answers, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not get between the replies
    _serve(sys.stdin.buffer, replies)
