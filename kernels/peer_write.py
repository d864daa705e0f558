"""One store through an address: whether a GPU can really write another one's memory.

``cudaDeviceCanAccessPeer`` only says that the hardware is capable of it. ``doctor`` launches this
kernel on one device with the address of a tensor on another, and looks at the tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_pattern_kernel(address, first, COUNT: tl.constexpr):
    """Word i of the ``COUNT`` int32 words at ``address`` becomes ``first + i``.

    ``write_pattern_kernel[(1,)](x.data_ptr(), 7, COUNT=4)`` leaves x = [7, 8, 9, 10].
    """
    words = tl.arange(0, COUNT)
    target = address.to(tl.int64).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(target + words, first + words)
