"""How the process of a router is set up, beside its event loop.

Once a large piece is freed, glibc expects more of its size. It then cuts pieces of up to 32 MiB out of a heap that shrinks at its
end alone: a router that had read 256 MiB of bodies kept most of it. With a fixed bound each large piece is mapped by itself, and
unmapped. Smaller ones come from the heap, whose free end stays up to a size.

The event loop shares Python's lock with the thread that parses large bodies. Each time that the loop wakes it waits for as
long as that thread may keep the lock.
"""

import ctypes
import gc
import sys

_M_MMAP_THRESHOLD = -3
_M_TRIM_THRESHOLD = -1
_LARGE_BYTES = 128 << 10  # glibc's own before it adapts
# Of the heap's end. glibc keeps 128 KiB: what one turn of the loop gives back the next one would have mapped anew.
_KEPT_BYTES = 16 << 20
_SWITCH_S = 0.001  # Python's own is 5 ms
# New objects, less those that are gone, after which Python looks for circles, of which an answer has none. By its own 700 it looked
# through the requests under way after every sixteenth answer, for 3% of the CPU; beyond 3,000 nothing more is gained.
_NEW_OBJECTS = 3_000


def prepare() -> None:
    """Before a router is made. Other C libraries than glibc know no such bound, and stay as they are."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    sys.setswitchinterval(_SWITCH_S)


def settle() -> None:
    """Once a router is made. What is there by now stays: to look through it again took a full collection 80 ms, in which no request went on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
