"""The numba kernel that runs the kernels of a `LaunchSequence`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import kernel as nb

_meet = types.ExternalFunction("GOMP_barrier", types.void())


@intrinsic
def _call(_typing_context: Any, address: types.Type, arguments: types.Type) -> Any:
    """Call a kernel by its address, with the address of its arguments."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        int64_pointer = ir.IntType(64).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [int64_pointer])
        function = builder.inttoptr(args[0], function_type.as_pointer())
        builder.call(function, [builder.inttoptr(args[1], int64_pointer)])
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@nb.Kernel
def run_sequence(arguments):
    """Run kernels in order. Each begins after the previous one has ended in all threads. A status ends the sequence.

    The table has for each kernel its address, the address of its arguments, and whether the first thread alone runs it.
    """
    status, count, address = nb.unpack(arguments, 3)
    table = nb.int64s(address)
    is_first = nb.thread_index() == 0
    for number in range(0, 3 * count, 3):
        values = table[number + 1]
        if is_first or table[number + 2] == 0:
            _call(table[number], values)
        _meet()
        status = nb.int64s(values)[0]
        if status != 0:
            arguments[0] = status
            return
