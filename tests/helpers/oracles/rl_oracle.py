"""Oracles for reinforcement learning: one token at a time in Python's floats, from the papers.

Nothing here is vectorised, nothing is shared with the library. Arrays are nested lists: `rewards`
(P, G), one list for each prompt; all else (B, R), one list for each of the B = P x G responses,
prompt after prompt. `mask` marks the kept tokens. What lies outside it is never read.
"""

import math

LARGEST_EXPONENT = 20.0  # every log-ratio is held to +-20 before it becomes a ratio


def mean(values):
    return math.fsum(values) / len(values)


def deviation(values):
    """The population's: the mean square distance from the mean, not corrected for its estimate."""
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / len(values))


def kept(mask_row):
    return [t for t, keep in enumerate(mask_row) if keep]


def table(mask, entry=lambda row, t: 0.0, outside=0.0):
    """(B, R): `entry(row, t)` at the kept tokens, `outside` at the others."""
    return [
        [entry(row, t) if keep else outside for t, keep in enumerate(mask_row)]
        for row, mask_row in enumerate(mask)
    ]


def ratio_of(log_ratio):
    return math.exp(max(-LARGEST_EXPONENT, min(LARGEST_EXPONENT, log_ratio)))


# ------------------------------------------------------------------ baselines: rewards -> (P, G)


def group_mean(rewards):
    """GRPO (2402.03300), section 4.1.2: the numerator of its advantage."""
    return [[0.0 if len(set(group)) == 1 else r - mean(group) for r in group] for group in rewards]


def leave_one_out(rewards):
    """RLOO (2402.14740): the baseline is the mean of the *other* samples' rewards."""
    return [
        [r - mean(g[:i] + g[i + 1 :]) if len(set(g)) > 1 else 0.0 for i, r in enumerate(g)]
        for g in rewards
    ]


def batch_mean(rewards):
    """REINFORCE (Williams 1992) with the mean reward of the whole step as its baseline."""
    middle = mean([r for group in rewards for r in group])
    return [[r - middle for r in group] for group in rewards]


def no_baseline(rewards):
    return [list(group) for group in rewards]


# --------------------------------------------- scales: (advantages, rewards, mask) -> (B, R)


def group_std(advantages, rewards, mask):
    """GRPO (2402.03300), section 4.1.2: over the deviation of the group's rewards (+ 1e-4); a group
    of equal rewards says nothing, whatever the baseline."""

    widths = [
        deviation(group) + 1e-4 if len(set(group)) > 1 else math.inf
        for group in rewards
        for _ in group
    ]
    return table(mask, lambda row, t: advantages[row][t] / widths[row])


def batch_std(advantages, rewards, mask):
    """Lite PPO (2508.08221): over the deviation of all responses' advantages (+ 1e-8)."""
    of_rows = [advantages[row][kept(m)[0]] for row, m in enumerate(mask) if kept(m)]
    return table(mask, lambda row, t: advantages[row][t] / (deviation(of_rows) + 1e-8))


def token_std(advantages, rewards, mask):
    """REINFORCE++ (2501.03262): normalised by mean and deviation over all tokens of the step."""
    tokens = [advantages[row][t] for row, m in enumerate(mask) for t in kept(m)]
    if len(set(tokens)) < 2:
        return table(mask)
    middle, width = mean(tokens), deviation(tokens) + 1e-8
    return table(mask, lambda row, t: (advantages[row][t] - middle) / width)


def no_scale(advantages, rewards, mask):
    return table(mask, lambda row, t: advantages[row][t])


# ---------------------------------------------------- aggregations: (mask, length) -> (B, R)


def token_mean(mask, length):
    """DAPO (2503.14476), equation 12: every token of the step alike."""
    return table(mask, lambda row, t: 1 / sum(len(kept(m)) for m in mask))


def responses(mask):
    return sum(bool(kept(m)) for m in mask)


def seq_mean_token_mean(mask, length):
    """GRPO (2402.03300), equation 3: the mean over responses of the mean over their tokens."""
    return table(mask, lambda row, t: 1 / len(kept(mask[row])) / responses(mask))


def seq_mean_token_sum(mask, length):
    """RLOO (2402.14740): a response is one action, its log-probability is a sum."""
    return table(mask, lambda row, t: 1 / responses(mask))


def seq_mean_token_sum_norm(mask, length):
    """Dr. GRPO (2503.20783), listing 1: the sum over a length that is the same for all."""
    return table(mask, lambda row, t: 1 / length / responses(mask))


# ------------------------------------------------------------------------------------ losses
# (logp, old, advantages, mask, weights, **arguments) -> value, gradient, stats. `gradient` is that
# of sum(weights * value) with respect to each logp, differentiated by hand.


def by_token(rule):
    """The loss of `rule(logp, old, advantage)` -> (value, its derivative, {stat: value})."""

    def loss(logp, old, advantages, mask, weights, **arguments):
        value, gradient, stats = table(mask), table(mask), {}
        for row, mask_row in enumerate(mask):
            for t in kept(mask_row):
                token = logp[row][t], old[row][t], advantages[row][t]
                value[row][t], slope, found = rule(*token, **arguments)
                gradient[row][t] = weights[row][t] * slope
                for name, stat in found.items():
                    stats.setdefault(name, table(mask))[row][t] = float(stat)
        return value, gradient, stats

    loss.__doc__ = rule.__doc__
    return loss


@by_token
def ppo(logp, old, advantage, clip_low=0.2, clip_high=0.2, dual_clip=0.0):
    """PPO (1707.06347), equation 7, with DAPO's two bounds (2503.14476, equation 10).

    The dual clip is equation 5 of 1912.09729: the objective of a negative advantage is at least
    dual_clip x advantage.
    """
    ratio = ratio_of(logp - old)
    bounded = max(1 - clip_low, min(1 + clip_high, ratio))
    objective = slope = ratio * advantage
    if bounded * advantage < objective:
        objective, slope = bounded * advantage, 0.0
    dual = bool(dual_clip) and advantage < 0 and ratio > dual_clip
    if dual:
        objective, slope = dual_clip * advantage, 0.0
    low, high = ratio < 1 - clip_low and advantage < 0, ratio > 1 + clip_high and advantage > 0
    stats = {"ratio": ratio, "clipped_low": low, "clipped_high": high}
    if dual_clip:
        stats["clipped_dual"] = dual
    return -objective, -slope, stats


def gspo(logp, old, advantages, mask, weights, clip_low=3e-4, clip_high=4e-4):
    """GSPO (2507.18071), equations 5 to 7, in the form for tokens (equations 13 and 14).

    Each token's ratio has its response's value, the geometric mean of the tokens' ratios, and
    counts as a function of the token's own log-probability when it is differentiated.
    """
    before = []  # such that each token's log-ratio is its response's mean
    for row, tokens in enumerate(map(kept, mask)):
        middle = mean([logp[row][t] - old[row][t] for t in tokens]) if tokens else 0.0
        before.append([new - min(10.0, middle) for new in logp[row]])
    bounds = {"clip_low": clip_low, "clip_high": clip_high}
    return ppo(logp, before, advantages, mask, weights, **bounds)


@by_token
def cispo(logp, old, advantage, clip_low=1.0, clip_high=4.0):
    """CISPO (2506.13585), equations 4 and 5: the clipped ratio is a constant weight."""
    ratio = ratio_of(logp - old)
    weight = max(1 - clip_low, min(1 + clip_high, ratio))
    low, high = ratio < 1 - clip_low and advantage < 0, ratio > 1 + clip_high and advantage > 0
    stats = {"ratio": ratio, "clipped_low": low, "clipped_high": high}
    return -weight * advantage * logp, -weight * advantage, stats


@by_token
def reinforce(logp, old, advantage):
    """REINFORCE (Williams 1992): the score function times the advantage; `old` plays no part."""
    return -advantage * logp, -advantage, {"ratio": 1.0}


@by_token
def sapo(logp, old, advantage, tau_positive=1.0, tau_negative=1.05):
    """SAPO (2511.20347), its soft gate: sigmoid(tau (r - 1)) 4 / tau in the ratio's place."""
    ratio = ratio_of(logp - old)
    tau = tau_positive if advantage > 0 else tau_negative
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    slope = 4 * gate * (1 - gate) * ratio
    return -advantage * gate * 4 / tau, -advantage * slope, {"ratio": ratio}


def gmpo(logp, old, advantages, mask, weights, clip_low=0.4, clip_high=0.4):
    """GMPO (2507.20673), equation 4 and algorithm 1: the geometric mean of the clipped ratios.

    The bounds are of log-ratios, and one-sided by the advantage's sign (0 counts as negative). A
    response has one advantage and one value, which stands at each of its tokens.
    """
    value, gradient, ratio, low, high = (table(mask) for _ in range(5))
    for row, tokens in enumerate(map(kept, mask)):
        bounded = {}
        for t in tokens:
            advantage, log_ratio = advantages[row][tokens[0]], logp[row][t] - old[row][t]
            low[row][t] = float(advantage < 0 and log_ratio < -clip_low)
            high[row][t] = float(advantage > 0 and log_ratio > clip_high)
            bounds = (-math.inf, clip_high) if advantage > 0 else (-clip_low, math.inf)
            bounded[t] = max(bounds[0], min(bounds[1], log_ratio))
        for t in tokens:
            ratio[row][t] = math.exp(mean(bounded.values()))
            value[row][t] = -advantage * ratio[row][t]
            if not low[row][t] and not high[row][t]:
                total = math.fsum(weights[row][u] for u in tokens)
                gradient[row][t] = total * value[row][t] / len(tokens)
    return value, gradient, {"ratio": ratio, "clipped_low": low, "clipped_high": high}


# ------------------------- corrections: (log_ratio, mask, advantages, **arguments) -> weights, keep


def weighted(mask, weight):
    """Weights, and every kept token kept."""
    return table(mask, weight, outside=1.0), table(mask, lambda row, t: True, outside=False)


def filtered(mask, keep):
    return table(mask, lambda row, t: 1.0, outside=1.0), table(mask, keep, outside=False)


def of_response(log_ratio, mask, row):
    return [log_ratio[row][t] for t in kept(mask[row])]


def tis(log_ratio, mask, advantages, cap=2.0, low=0.0):
    """Truncated importance sampling of tokens (Ionides 2008; Yao et al. 2025)."""
    return weighted(mask, lambda row, t: max(low, min(cap, ratio_of(log_ratio[row][t]))))


def seq_tis(log_ratio, mask, advantages, cap=5.0):
    """The same for a response, whose probability is the product of its tokens'."""
    return weighted(
        mask, lambda row, t: min(cap, ratio_of(math.fsum(of_response(log_ratio, mask, row))))
    )


def icepop(log_ratio, mask, advantages, low=0.5, high=5.0):
    """IcePop (2510.18855): the ratio within the bounds, 0 outside them."""

    def weight(row, t):
        ratio = ratio_of(log_ratio[row][t])
        return ratio if low <= ratio <= high else 0.0

    return weighted(mask, weight)


def mask_sequence(log_ratio, mask, advantages, low=0.5, high=2.0):
    """Responses whose ratio, a product, lies within the bounds (Liu, Li et al. 2025)."""
    return filtered(
        mask, lambda row, t: low <= ratio_of(math.fsum(of_response(log_ratio, mask, row))) <= high
    )


def mask_geometric(log_ratio, mask, advantages, low=0.999, high=1.001):
    """Responses whose geometric mean of ratios lies within the bounds (same source)."""
    return filtered(
        mask, lambda row, t: low <= ratio_of(mean(of_response(log_ratio, mask, row))) <= high
    )


def mask_k3(log_ratio, mask, advantages, most=0.01):
    """Responses whose mean of Schulman's third estimator (2020) is at most `most`."""

    def keep(row, t):
        return mean([ratio_of(d) - 1 - d for d in of_response(log_ratio, mask, row)]) <= most

    return filtered(mask, keep)


def veto(log_ratio, mask, advantages, least=1e-4):
    """Responses without a token whose ratio is below `least` (same source)."""

    def keep(row, t):
        return min(ratio_of(d) for d in of_response(log_ratio, mask, row)) >= least

    return filtered(mask, keep)


def opsm(log_ratio, mask, advantages, delta=1e-4):
    """DeepSeek-V3.2 (2512.02556), equation 9: a negative advantage far from its sampler goes.

    The distance is the mean over the response of log(sampler / learner), which is -log_ratio.
    """

    def keep(row, t):
        return advantages[row][t] >= 0 or -mean(of_response(log_ratio, mask, row)) <= delta

    return filtered(mask, keep)


# -------------------------------------- KL estimators of one token: value, derivative by logp


def kl(name, logp, reference):
    """Schulman, Approximating KL divergence (2020), with r = reference / policy.

    k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, abs = |log r|. A `+` after the name puts
    k2's derivative in the place of its own (2506.09477: in expectation that of the true KL).
    """
    log_r = reference - logp
    value, slope = {
        "k1": (-log_r, 1.0),
        "k2": (log_r**2 / 2, -log_r),
        "k3": (math.exp(log_r) - 1 - log_r, 1 - math.exp(log_r)),
        "abs": (abs(log_r), (log_r < 0) * 1.0 - (log_r > 0) * 1.0),
    }[name.removesuffix("+")]
    return (value, -log_r) if name.endswith("+") else (value, slope)


# --------------------------------------------------------------------------------- shaping


def overlong_penalty(lengths, max_length, buffer, factor):
    """DAPO (2503.14476), equation 13, times `factor`."""
    out = []
    for n in lengths:
        if n <= max_length - buffer:
            out.append(0.0)
        elif n <= max_length:
            out.append((max_length - buffer - n) / buffer * factor)
        else:
            out.append(-factor)
    return out


def informative_groups(rewards):
    """DAPO (2503.14476), equation 11: a group whose rewards are all alike teaches nothing."""
    return [len(set(g)) > 1 for g in rewards]
