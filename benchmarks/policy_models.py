"""Textbook cache policies, simulated access by access: what the host tier's policy is measured against.

Free functions of one thread: `keys` int64[n] with values 0..universe-1, `capacity` in rows; each answers
bool[n], True where the access missed. All are fully associative.
"""

from __future__ import annotations

import numba as nb
import numpy as np


@nb.njit(cache=True)
def _unlink(before, after, key):  # type: ignore[no-untyped-def]
    after[before[key]] = after[key]
    before[after[key]] = before[key]


@nb.njit(cache=True)
def _push(before, after, head, key):  # type: ignore[no-untyped-def]
    """Put `key` behind the list's sentinel `head`: most recently used."""
    after[key], before[key] = after[head], head
    before[after[head]] = key
    after[head] = key


@nb.njit(cache=True)
def lru(keys, universe, capacity):  # type: ignore[no-untyped-def]
    before = np.arange(universe + 1)
    after = np.arange(universe + 1)
    resident = np.zeros(universe, np.bool_)
    missed = np.zeros(keys.size, np.bool_)
    size, head = 0, universe
    for i in range(keys.size):
        key = keys[i]
        if resident[key]:
            _unlink(before, after, key)
        else:
            missed[i] = True
            if size == capacity:
                old = before[head]
                _unlink(before, after, old)
                resident[old] = False
            else:
                size += 1
            resident[key] = True
        _push(before, after, head, key)
    return missed


@nb.njit(cache=True)
def s3fifo(keys, universe, capacity):  # type: ignore[no-untyped-def]
    """S3-FIFO (Yang et al., SOSP 2023): small queue 10%, main queue with 2-bit counters, a ghost as long as main."""
    small_size = max(1, capacity // 10)
    main_size = capacity - small_size
    small = np.empty(capacity + 1, np.int64)  # rings; the small queue may hold all while main is not full
    main = np.empty(capacity + 1, np.int64)
    small_head = small_count = main_head = main_count = 0
    place = np.zeros(universe, np.uint8)  # 0 out, 1 small, 2 main
    freq = np.zeros(universe, np.uint8)
    ghost_at = np.full(universe, -1, np.int64)  # when the key last entered the ghost queue
    ghost_clock = 0
    missed = np.zeros(keys.size, np.bool_)
    for i in range(keys.size):
        key = keys[i]
        if place[key]:
            freq[key] = min(3, freq[key] + 1)
            continue
        missed[i] = True
        while small_count + main_count >= capacity:
            if small_count >= small_size or main_count == 0:
                old = small[small_head]
                small_head = (small_head + 1) % small.size
                small_count -= 1
                if freq[old] <= 1:
                    place[old] = 0
                    ghost_at[old] = ghost_clock
                    ghost_clock += 1
                    continue
                main[(main_head + main_count) % main.size] = old
                main_count += 1
                place[old] = 2
                if main_count <= main_size:
                    continue
            while True:
                old = main[main_head]
                main_head = (main_head + 1) % main.size
                if freq[old] == 0:
                    break
                freq[old] -= 1
                main[(main_head + main_count - 1) % main.size] = old
            main_count -= 1
            place[old] = 0
        freq[key] = 0
        if ghost_at[key] >= 0 and ghost_at[key] >= ghost_clock - main_size:
            ghost_at[key] = -1
            main[(main_head + main_count) % main.size] = key
            main_count += 1
            place[key] = 2
        else:
            small[(small_head + small_count) % small.size] = key
            small_count += 1
            place[key] = 1
    return missed


@nb.njit(cache=True)
def _spread(key, row, mask):  # type: ignore[no-untyped-def]
    x = (nb.uint64(key) + nb.uint64(row + 1)) * nb.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> nb.uint64(29))) * nb.uint64(0xBF58476D1CE4E5B9)
    return nb.int64((x >> nb.uint64(32)) & nb.uint64(mask))


@nb.njit(cache=True)
def _estimate(sketch, key):  # type: ignore[no-untyped-def]
    least = 15
    for row in range(4):
        least = min(least, sketch[row, _spread(key, row, sketch.shape[1] - 1)])
    return least


@nb.njit(cache=True)
def w_tinylfu(keys, universe, capacity):  # type: ignore[no-untyped-def]
    """W-TinyLFU (Einziger et al. 2017): LRU window 1%, main of probation and protected (80%), sketch halved every 10 x capacity."""
    window_size = max(1, capacity // 100)
    main_size = capacity - window_size
    protected_size = main_size * 8 // 10
    width = 1
    while width < 4 * capacity:
        width *= 2
    sketch = np.zeros((4, width), np.uint8)
    counted = 0
    before = np.arange(universe + 3)
    after = np.arange(universe + 3)
    window, probation, protected = universe, universe + 1, universe + 2
    windows = mains = protects = 0
    place = np.zeros(universe, np.uint8)  # 0 out, 1 window, 2 probation, 3 protected
    missed = np.zeros(keys.size, np.bool_)
    for i in range(keys.size):
        key = keys[i]
        count = _estimate(sketch, key)
        if count < 15:
            for row in range(4):
                at = _spread(key, row, width - 1)
                if sketch[row, at] == count:
                    sketch[row, at] += 1
            counted += 1
            if counted >= 10 * capacity:
                for row in range(4):
                    for at in range(width):
                        sketch[row, at] >>= 1
                counted //= 2
        if place[key] == 1:
            _unlink(before, after, key)
            _push(before, after, window, key)
            continue
        if place[key] >= 2:
            _unlink(before, after, key)
            _push(before, after, protected, key)
            if place[key] == 2:
                place[key] = 3
                protects += 1
                if protects > protected_size:
                    old = before[protected]
                    _unlink(before, after, old)
                    _push(before, after, probation, old)
                    place[old] = 2
                    protects -= 1
            continue
        missed[i] = True
        place[key] = 1
        _push(before, after, window, key)
        windows += 1
        if windows <= window_size:
            continue
        candidate = before[window]
        _unlink(before, after, candidate)
        windows -= 1
        if mains < main_size:
            mains += 1
        else:
            victim = before[probation] if before[probation] != probation else before[protected]
            if _estimate(sketch, candidate) <= _estimate(sketch, victim):
                place[candidate] = 0
                continue
            if place[victim] == 3:
                protects -= 1
            _unlink(before, after, victim)
            place[victim] = 0
        _push(before, after, probation, candidate)
        place[candidate] = 2
    return missed


@nb.njit(cache=True)
def belady(keys, universe, capacity):  # type: ignore[no-untyped-def]
    """The optimum (Belady 1966) with bypass: keep what is asked for again soonest."""
    n = keys.size
    following = np.empty(n, np.int64)
    last = np.full(universe, n + 1, np.int64)
    for i in range(n - 1, -1, -1):
        following[i] = last[keys[i]]
        last[keys[i]] = i
    due = np.full(universe, -1, np.int64)  # when a resident key is asked for next; -1 not resident
    heap = np.empty(n + 1, np.int64)  # of times, the latest on top; stale entries are passed over
    heap_size = size = 0
    missed = np.zeros(n, np.bool_)
    for i in range(n):
        key, time = keys[i], following[i]
        if due[key] >= 0:
            due[key] = time
        else:
            missed[i] = True
            if time > n:
                continue
            if size < capacity:
                size += 1
            else:
                while True:
                    top = heap[0]
                    old = keys[top]
                    if due[old] == top:
                        break
                    heap_size = _pop(heap, heap_size)
                if top <= time:
                    continue
                due[old] = -1
                heap_size = _pop(heap, heap_size)
            due[key] = time
        if time > n:  # a resident key that never comes again makes room at once
            due[key] = -1
            size -= 1
            continue
        at = heap_size
        heap_size += 1
        while at > 0 and heap[(at - 1) >> 1] < time:
            heap[at] = heap[(at - 1) >> 1]
            at = (at - 1) >> 1
        heap[at] = time
    return missed


@nb.njit(cache=True)
def _pop(heap, size):  # type: ignore[no-untyped-def]
    size -= 1
    last, at = heap[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1] > heap[child]:
            child += 1
        if heap[child] <= last:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = last
    return size
