"""Kernels in CUDA C++, for features that Triton lacks: thread block clusters, and lookup tables in shared memory.

NVRTC compiles them once a process (some 0.3 s) for the GPU in use, through NVIDIA's ``cuda-bindings``, which torch
installs. Without the bindings, or on a GPU without the features, operators use their Triton kernels, with the same
results. Linear layers of 4 bits, and of several rows in 8 bits, are then left to their library.
"""

from __future__ import annotations

import ctypes
import logging
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
CLUSTERS = 9  # least compute capability with clusters and dependent launches


class Kernel:
    """A compiled kernel on one GPU, launched as a dependent launch (see :mod:`._overlap`) where the GPU has them."""

    def __init__(self, driver, function, shared: int, dependent: bool = True) -> None:
        self._driver, self._function = driver, function
        self.shared_bytes = shared
        self._resident: dict[tuple[int, int], int] = {}
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self._attributes = [attribute] if dependent else []

    def resident(self, threads: int, where: Tensor, shared: int = 0) -> int:
        """Blocks of so many threads and bytes of dynamic shared memory that a processor holds at once."""
        if (threads, shared) not in self._resident:
            with _current(self._driver, where.get_device()):
                ask = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
                self._resident[threads, shared] = _check(ask(self._function, threads, shared))
        return self._resident[threads, shared]

    def launch(self, grid: tuple[int, int], threads: int, shared: int, where: Tensor, *args) -> None:
        """``args``: tensors, ``None`` for a null pointer, ints as C's ``long long``; the kernel declares them so."""
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.attrs, config.numAttrs = self._attributes, len(self._attributes)
        values = [t.data_ptr() if isinstance(t, Tensor) else t or 0 for t in args]
        packed = (ctypes.c_longlong * len(values))(*values)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(packed) + 8 * i for i in range(len(values))))
        with _current(self._driver, where.get_device()):
            config.hStream = torch.cuda.current_stream().cuda_stream
            _check(self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))


def float_bits(number: float) -> int:
    """``number`` as a float32, as the whole number that has its bits: kernels get no other arguments."""
    return struct.unpack("I", struct.pack("f", number))[0]


def _check(answer):
    """Result of a ``cuda-bindings`` call, without its status.

    Raises:
        RuntimeError: the status reports an error.
    """
    status, *values = answer
    if status:
        raise RuntimeError(f"{type(status).__name__}: {status.name}")
    return values[0] if values else None


@contextmanager
def _current(driver, device: int) -> Iterator[None]:
    """Make ``device`` and its context current for this thread.

    A thread has no context before its first CUDA runtime call, and torch creates none if the device is current.
    """
    with torch.cuda.device(device):
        if not int(_check(driver.cuCtxGetCurrent())):
            context = _check(driver.cuDevicePrimaryCtxRetain(_check(driver.cuDeviceGet(device))))
            _check(driver.cuCtxSetCurrent(context))
        yield


@cache
def _bindings():
    """NVIDIA's ``driver`` and ``nvrtc``; ``None`` where they are not installed."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError:
        return None
    return driver, nvrtc


def why_not(device: int, least: int = CLUSTERS) -> str | None:
    """Why kernels that need compute capability ``least`` do not run on a CUDA device; ``None`` where they do."""
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    if torch.cuda.get_device_capability(device)[0] < least:
        if least < CLUSTERS:
            return f"the GPU is older than compute {least}.0"
        return "the GPU has no clusters of thread blocks, which are from compute 9.0 on"
    return "cuda-bindings is not installed" if _bindings() is None else None


def load(where: Tensor, package: str, file: str, name: str, least: int = CLUSTERS, **defined: float) -> Kernel | None:
    """The kernel ``name`` of ``file``, a resource of ``package``, for the GPU of ``where``; ``defined`` are its macros.

    ``None`` where it cannot run, as where compute capability is below ``least``; if it should, the reason has been
    logged once.
    """
    if not where.is_cuda:
        return None
    return _load(where.get_device(), package, file, name, least, tuple(sorted(defined.items())))


@cache
def _load(
    device: int, package: str, file: str, name: str, least: int, defined: tuple[tuple[str, float], ...]
) -> Kernel | None:
    if why_not(device, least):
        return None
    driver, nvrtc = _bindings()
    major, minor = torch.cuda.get_device_capability(device)
    try:
        with _current(driver, device):
            # A step may be under capture; other threads' work does not concern this one.
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            mode = _check(driver.cuThreadExchangeStreamCaptureMode(mode))
            try:
                code, _ = compile_file(nvrtc, 10 * major + minor, package, file, dict(defined))
                module = _check(driver.cuModuleLoadData(code))
                function = _check(driver.cuModuleGetFunction(module, name.encode()))
                shared = _most_shared(driver, function, device)
            finally:
                _check(driver.cuThreadExchangeStreamCaptureMode(mode))
    except RuntimeError as problem:
        logger.warning("%s is not used, what stands in for it is slower: %s", name, problem)
        return None
    return Kernel(driver, function, shared, dependent=major >= CLUSTERS)


def _most_shared(driver, function, device: int) -> int:
    """Allow ``function`` all shared memory that a block may have; returns the bytes left besides its static memory."""
    kind = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    most = _check(driver.cuDeviceGetAttribute(kind, _check(driver.cuDeviceGet(device))))
    kind = driver.CUfunction_attribute
    most -= _check(driver.cuFuncGetAttribute(kind.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
    _check(driver.cuFuncSetAttribute(function, kind.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most))
    return most


def read_source(package: str, file: str, defined: dict[str, float]) -> str:
    """``file``, a resource of ``package``, after the C++ code that sources with these macros share.

    Its includes are beside its package.
    """
    shared = (files(__package__) / "_cuda_16.cuh").read_text() if "BFLOAT16" in defined else ""
    source, beside = (files(package) / file).read_text(), files(package.rpartition(".")[0])
    source = re.sub(r'^#include "(.+)"$', lambda found: (beside / found[1]).read_text(), source, flags=re.MULTILINE)
    return shared + "\n" + source


def compile_file(
    nvrtc, arch: int, package: str, file: str, defined: dict[str, float], *options: str
) -> tuple[bytes, str]:
    """Machine code (cubin) of ``file``, a resource of ``package``, for sm_``arch``, and the compiler's log.

    Args:
        defined: macros.
        options: of NVRTC, in addition.

    Raises:
        RuntimeError: the file does not compile; the message is the compiler's log.
    """
    source = "\n".join(((files(__package__) / "_cuda.cuh").read_text(), read_source(package, file, defined)))
    options = ("--std=c++17", f"--gpu-architecture=sm_{arch}", *(f"-D{k}={v}" for k, v in defined.items()), *options)
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), file.encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))  # written in place, as bytes may not be
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        told = log.decode(errors="replace").strip("\0 \n")
        if status:
            raise RuntimeError(told or status.name)
        code = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
        _check(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code, told
