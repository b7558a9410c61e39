"""The smallest possible host: ctypes and the C table, nothing else of the package.

Its "model" is a running hash of the tokens. A real host does the same three things for each ubatch, only with a graph:
ask for a slot, gather the rows that s_copy names, write the new states to the slot.

    python examples/host_from_scratch.py
"""

import ctypes as c

from rcache_plugin import CacheSpec, HostVTable, RecurrentCache


class UBatch(c.Structure):  # struct rcache_ubatch
    _fields_ = [("struct_size", c.c_uint32), ("n_seqs", c.c_uint32), ("n_seq_tokens", c.c_uint32),
                ("reserved", c.c_uint32), ("n_seq_id", c.POINTER(c.c_int32)),
                ("seq_id", c.POINTER(c.POINTER(c.c_int32))), ("pos", c.POINTER(c.c_int32)),
                ("token", c.POINTER(c.c_int32))]


class Slot(c.Structure):  # struct rcache_slot
    _fields_ = [("struct_size", c.c_uint32), ("head", c.c_int32), ("n", c.c_int32), ("rs_z", c.c_int32)]


class Table(c.Structure):  # the first entries of struct rcache_vtable
    _fields_ = [("abi_version", c.c_uint32), ("struct_size", c.c_uint32), ("user", c.c_void_p),
                ("prepare", c.CFUNCTYPE(c.c_int32, c.c_void_p, c.POINTER(UBatch), c.c_uint32)),
                ("find_slot", c.CFUNCTYPE(c.c_int32, c.c_void_p, c.POINTER(UBatch), c.POINTER(Slot))),
                ("s_copy", c.CFUNCTYPE(c.c_int32, c.c_void_p, c.c_int32)),
                ("s_mask", c.CFUNCTYPE(c.c_float, c.c_void_p, c.c_int32))]


def int32s(*values: int) -> "c.Array[c.c_int32]":
    return (c.c_int32 * len(values))(*values)


def step(table: Table, rows: list[int], tokens: dict[int, int], pos: dict[int, int]) -> None:
    """One token of each of these sequences."""
    ids = [int32s(seq_id) for seq_id in tokens]
    ubatch = UBatch(c.sizeof(UBatch), len(ids), 1, 0, int32s(*[1] * len(ids)),
                    (c.POINTER(c.c_int32) * len(ids))(*(c.cast(i, c.POINTER(c.c_int32)) for i in ids)),
                    int32s(*(pos[seq_id] for seq_id in tokens)), int32s(*tokens.values()))
    slot = Slot(c.sizeof(Slot))
    status = table.find_slot(table.user, ubatch, slot)
    if status != 0:
        raise RuntimeError(f"no slot: status {status}")
    source = [table.s_copy(table.user, i) for i in range(slot.n)]
    keep = [table.s_mask(table.user, i) for i in range(slot.n)]
    state = [rows[row] if mask else 0 for row, mask in zip(source, keep)]  # gather, or start from zero
    for i, token in enumerate(tokens.values()):
        state[i] = hash((state[i], token)) & 0xFFFF  # compute
    rows[slot.head : slot.head + slot.n] = state  # write back
    print(f"sequences {list(tokens)}: cells {slot.head}..{slot.head + slot.n - 1} read from {source}, keep {keep}")
    for seq_id in tokens:
        pos[seq_id] += 1


cache = RecurrentCache(CacheSpec.make([1], [1]), n_cells=4, allocate=False)  # the rows are ours, a list
with HostVTable(cache) as vtable:
    table = Table.from_address(vtable.address)
    if table.abi_version != 2:
        raise SystemExit("this host speaks version 2")
    rows, pos = [0] * 4, dict.fromkeys(range(4), 0)
    step(table, rows, {0: 11, 1: 21, 2: 31}, pos)
    step(table, rows, {2: 32, 0: 12}, pos)
    step(table, rows, {3: 41, 1: 22}, pos)
    print("rows:", rows)
