"""libapex.so through ctypes, for tests: the C interface of csrc/host/apex.h."""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int32, c_size_t, c_uint32, c_void_p

OK, USE_REFERENCE, ARGUMENT, DRIVER, NO_DRIVER, NO_KERNEL, FORKED, EXECUTOR, MEMORY = range(9)
UNKNOWN, KERNEL, CPU_VARIANT, REFERENCE = range(4)
CPU, CUDA, HIP = range(3)

Resolver = ctypes.CFUNCTYPE(c_int32, c_int32, c_int32, c_char_p)
Executor = ctypes.CFUNCTYPE(
    c_void_p, c_char_p, *[c_uint32] * 6, c_size_t, c_uint32, POINTER(c_void_p)
)  # c_void_p: a char* that must outlive the call


class Place(ctypes.Structure):
    """apex_place."""

    _fields_ = [("platform", c_int32), ("device", c_int32), ("stream", c_void_p)]


class Kernel(ctypes.Structure):
    """apex_kernel."""

    _fields_ = [("unit", c_char_p), ("name", c_char_p), ("slot", c_uint32), ("awaits", c_int32)]


class Dim(ctypes.Structure):
    """apex_dim."""

    _fields_ = [("x", c_uint32), ("y", c_uint32), ("z", c_uint32)]


class DeviceInfo(ctypes.Structure):
    """apex_device_info."""

    _fields_ = [
        ("multiprocessors", c_int32),
        ("warp_size", c_int32),
        ("l2_bytes", ctypes.c_int64),
        ("shared_bytes_per_block", ctypes.c_int64),
        ("driver_version", c_int32),
        ("arch", ctypes.c_char * 64),
    ]


class Apex:
    """The loaded library, with a method per function."""

    def __init__(self, path):
        self.c = ctypes.CDLL(str(path))
        self.c.apex_last_error.restype = c_char_p
        self.c.apex_launch.argtypes = [POINTER(Place), POINTER(Kernel), Dim, Dim, c_uint32, POINTER(c_void_p)]
        self.c.apex_register_code_object.argtypes = [c_int32, c_int32, c_char_p, c_char_p, c_size_t]
        self.c.apex_set_executor.argtypes = [Executor, c_uint32]
        self.c.apex_set_resolver.argtypes = [Resolver]
        self.c.apex_find_vendor_library.argtypes = [c_char_p, c_char_p, c_size_t]
        self.c.apex_counters.argtypes = [POINTER(Place), c_int32, c_size_t, POINTER(c_void_p)]
        self.c.apex_take_memory.argtypes = [POINTER(Place), c_size_t, c_int32, POINTER(c_void_p)]
        self.c.apex_give_memory_back.argtypes = [POINTER(Place), c_size_t, c_void_p]
        self.c.apex_give_memory_back.restype = None
        self._kept = []  # callbacks that the library may call

    def __repr__(self):
        return f"Apex(last_error={self.last_error!r})"

    @property
    def last_error(self) -> str:
        """Text of this thread's last failure."""
        return self.c.apex_last_error().decode()

    def register(self, platform, device, unit, image) -> int:
        """apex_register_code_object with `image` as bytes."""
        return self.c.apex_register_code_object(platform, device, unit.encode(), image, len(image))

    def resolve(self, platform, device, unit) -> int:
        """apex_resolve."""
        return self.c.apex_resolve(platform, device, unit.encode())

    def set_resolver(self, function) -> None:
        """apex_set_resolver; None takes it away."""
        callback = Resolver(function) if function else Resolver()
        self._kept.append(callback)
        self.c.apex_set_resolver(callback)

    def set_executor(self, function, order=0) -> None:
        """apex_set_executor; None takes it away."""
        callback = Executor(function) if function else Executor()
        self._kept.append(callback)
        self.c.apex_set_executor(callback, order)

    def launch(
        self, platform, device, kernel, stream=None, grid=(1, 1, 1), block=(32, 1, 1), shared=0, parameters=()
    ) -> int:
        """apex_launch; `kernel` is a Kernel or "unit/name", which does not await.

        Parameters are ctypes values, or ints (int32).
        """
        if isinstance(kernel, str):
            kernel = Kernel(*(part.encode() for part in kernel.split("/")), 0)
        values = [c_int32(value) if isinstance(value, int) else value for value in parameters]
        pointers = (c_void_p * len(values))(*map(ctypes.addressof, values)) if values else None
        return self.c.apex_launch(
            byref(Place(platform, device, stream)), byref(kernel), Dim(*grid), Dim(*block), shared, pointers
        )

    def is_capturing(self, platform, device, stream=None) -> int:
        """apex_is_capturing."""
        return self.c.apex_is_capturing(byref(Place(platform, device, stream)))

    def counters(self, platform, device, stream=None, count=1) -> tuple[int, int | None]:
        """apex_counters of a place whose capture is asked for first: status and address, None for null."""
        found = c_void_p()
        capturing = self.is_capturing(platform, device, stream)
        place = Place(platform, device, stream)
        if capturing < 0:
            return -capturing, None
        return self.c.apex_counters(byref(place), capturing, count, byref(found)), found.value

    def take_memory(self, platform, device, stream=None, bytes=1, zeroed=True) -> tuple[int, int | None]:
        """apex_take_memory: status and address, None for null."""
        found = c_void_p()
        place = Place(platform, device, stream)
        return self.c.apex_take_memory(byref(place), bytes, zeroed, byref(found)), found.value

    def give_memory_back(self, platform, device, stream, bytes, memory) -> None:
        """apex_give_memory_back."""
        self.c.apex_give_memory_back(byref(Place(platform, device, stream)), bytes, memory)

    def device_info(self, platform, device) -> tuple[int, DeviceInfo]:
        """apex_get_device_info: status and what it filled in."""
        info = DeviceInfo()
        return self.c.apex_get_device_info(platform, device, byref(info)), info

    def find_vendor_library(self, stem, room=4096) -> tuple[int, str]:
        """apex_find_vendor_library: status and path."""
        path = ctypes.create_string_buffer(room)
        return self.c.apex_find_vendor_library(stem.encode(), path, room), path.value.decode()


class FakeDriver:
    """The test's side of a fake driver that is loaded in this process."""

    def __init__(self, path):
        self.c = ctypes.CDLL(str(path))
        self.c.fake_log.restype = c_char_p
        for name in ("fake_stream", "fake_context", "fake_primary", "fake_current"):
            if name == "fake_current" and not hasattr(self.c, "fake_context"):
                continue  # HIP: an ordinal
            if hasattr(self.c, name):
                getattr(self.c, name).restype = c_void_p
        self.c.fake_live.restype = c_size_t
        self.c.fake_set_room.argtypes = [c_size_t]
        for name in ("fake_push", "fake_begin_capture", "fake_end_capture", "fake_run"):
            if hasattr(self.c, name):
                getattr(self.c, name).argtypes = [c_void_p]

    def log(self) -> list[str]:
        """What was called since the last look."""
        lines = self.c.fake_log().decode().splitlines()
        self.c.fake_clear_log()
        return lines

    def fail(self, call, code) -> None:
        """Later calls of this name answer `code`; 0 ends that."""
        self.c.fake_fail(call.encode(), code)


def image(arch, *kernels) -> bytes:
    """A code object of the fakes."""
    return "\n".join([f"arch {arch}", *(f"kernel {kernel}" for kernel in kernels), ""]).encode()
