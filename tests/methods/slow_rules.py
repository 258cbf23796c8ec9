"""Relaxed rules implemented with loops over tokens, for comparison with the vectorised ones.

A distribution is a list of floats. Each function gives the output distribution of one place for siblings that
are known, by walking down the siblings: `reach` is the probability that a sibling is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Distribution = list[float]


def scaled(weights: Sequence[float], otherwise: Distribution) -> Distribution:
    total = sum(weights)
    return [weight / total for weight in weights] if total > 0 else otherwise


def prefix(p: Distribution, ids: Sequence[int], limit: float) -> tuple[float, int]:
    """Mass and number of the neighbours that stay within the limit: c_{m*} and m* of LANTERN."""
    total, count = 0.0, 0
    for neighbour in ids:
        if total + p[neighbour] > limit:
            break
        total, count = total + p[neighbour], count + 1
    return total, count


def released_lantern(
    p: Distribution,
    siblings: Sequence[int],
    q: Distribution | None,
    nearest: Sequence[Sequence[int]],
    k: int,
    limit: Callable[[float], float],
) -> Distribution:
    """LANTERN as released, `evaluate_posterior` at 3a56e45: dynamic trees (q None) and static ones.

    Args:
        q: the draft's distribution; the siblings were drawn from it without replacement.
        nearest: k + 1 neighbours of each code; syntax tokens have no entry.
    """
    output, reach, uniform = [0.0] * len(p), 1.0, [1 / len(nearest)] * len(nearest)
    uniform += [0.0] * (len(p) - len(nearest))
    for x in siblings:
        near = nearest[x] if x < len(nearest) else []
        c, count = prefix(p, near[:k], limit(p[x]))
        q_x = 1.0 if q is None else q[x]
        accept = min(1.0, (p[x] + c) / q_x)
        output[x] += reach * accept
        reach *= 1 - accept
        if q is None:
            left = [0.0 if v == x or (count and v in near) else p[v] for v in range(len(p))]
        else:
            left = [max(0.0, p[v] - (0.0 if count and v in near else q[v])) for v in range(len(p))]
            q = scaled([0.0 if v == x else q[v] for v in range(len(p))], [0.0] * len(p))
        p = scaled(left, uniform)
    return [mass + reach * rest for mass, rest in zip(output, p, strict=True)]


def lantern_of_one_point(p: Distribution, x: int, near: Sequence[int], limit: float) -> Distribution:
    """LANTERN with one deterministic candidate: only the mass of x and of the added neighbours changes."""
    c, count = prefix(p, near, limit)
    leaving = {x, *near[:count]} if p[x] > 0 else {x}
    accept = p[x] + c if p[x] > 0 else 0.0
    if p[x] == 0:
        leaving = {x, *near[:count]}
    rest = scaled([0.0 if v in leaving else p[v] for v in range(len(p))], p)
    return [(1 - accept) * rest[v] + (accept if v == x else 0.0) for v in range(len(p))]


def released_groups(p: Distribution, q: Distribution, vectors: Sequence[Sequence[float]]) -> list[float]:
    """GSD as released: acceptance probability of each token, rank by rank."""
    order = sorted(range(len(p)), key=lambda v: (p[v], v))
    ratios = [0.0] * len(p)
    for rank, x in enumerate(order):
        group = order[rank - 7 : rank + 7] if rank >= 7 else [x]
        members = []
        for v in group:
            gap = float("inf")
            if v < len(vectors) and x < len(vectors):
                gap = sum((a - b) ** 2 for a, b in zip(vectors[v], vectors[x], strict=True))
            if v == x or (abs(p[v] - p[x]) < 0.15 and gap < 0.5):
                members.append(v)
        mass, drafted = sum(p[v] for v in members), sum(q[v] for v in members)
        ratios[x] = min(1.0, mass / drafted) if drafted > 0 else 1.0
    return ratios


def ranked_groups(p: Distribution, q: Distribution, size: int) -> list[float]:
    """Acceptance probability of each token under the partition by rank."""
    order = [v for v in sorted(range(len(p)), key=lambda v: (-p[v], v)) if p[v] > 0]
    ratios = [0.0] * len(p)
    for start in range(0, len(order), size):
        group = order[start : start + size]
        mass, drafted = sum(p[v] for v in group), sum(q[v] for v in group)
        for v in group:
            ratios[v] = min(1.0, mass / drafted) if drafted > 0 else 1.0
    return ratios


def deferred(natives: list[bool], entropies: list[float], window: int, threshold: float) -> int:
    """Tokens that FLy accepts, given which the exact rule accepts and the target's entropies before them."""
    for place, native in enumerate(natives):
        following = natives[place + 1 : place + 1 + window]
        if not native and not (entropies[place] >= threshold and len(following) == window and all(following)):
            return place
    return len(natives)


def joint_runs(p_x: Distribution, q_x: Distribution, u: Sequence[float], confidence: float) -> int:
    """SJD-SV in the interpretation of mmspec: return the number of accepted tokens of a chain."""
    accepted = 0
    while accepted < len(p_x):
        if u[accepted] <= p_x[accepted] / q_x[accepted] and p_x[accepted] > 0:
            accepted += 1
            continue
        end = accepted + 1
        while end < len(p_x) and p_x[end] >= p_x[end - 1] > 0:
            end += 1
        for trimmed in range(end, accepted + 1, -1):
            product = 1.0
            for i in range(accepted, trimmed):
                product *= p_x[i] / q_x[i]
            if product >= max(u[accepted], confidence):
                break
        else:
            return accepted
        accepted = trimmed
    return accepted


def hierarchical(
    p: Sequence[Distribution], q: Sequence[Distribution], x: Sequence[int]
) -> tuple[list[float], list[Distribution]]:
    """HSD by its equations (2601.05724): acceptance of prefixes 1 to K; resampling after 0 to K - 1 tokens.

    Nothing is resampled after a prefix that is never accepted.
    """

    def capped(tokens: Sequence[int]) -> float:
        """r* of equation 16, by definitions 4 and 5."""
        joint = [1.0]
        for place, token in enumerate(tokens):
            joint.append(joint[-1] * p[place][token] / q[place][token])
        m = max(range(len(tokens)), key=lambda i: joint[i])
        return min(joint[m], 1.0) * joint[-1] / joint[m]

    accept, resample = [], []
    for t in range(len(x)):
        drawn = 1.0
        for place in range(t):
            drawn *= q[place][x[place]]
        branch = [(capped([*x[:t], y]) - 1) * drawn * q[t][y] for y in range(len(q[t]))]
        deficient = sum(max(each, 0.0) for each in branch)  # 17
        excess = sum(max(-each, 0.0) for each in branch)  # 18
        accept.append(deficient / excess)  # 19
        resample.append([max(each, 0.0) / deficient for each in branch] if deficient else [])  # 20
    return [*accept[1:], min(capped(x), 1.0)], resample
