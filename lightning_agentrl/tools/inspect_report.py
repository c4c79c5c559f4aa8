"""The report of `agentrl inspect`: what was seen of a policy, in words, with warnings and what to do about them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import islice

from lightning_agentrl.metrics.thoughts import COPIED, Thoughts
from lightning_agentrl.tools.looks import Average, Failure, Look, Spread
from lightning_agentrl.tools.view import Entry, Report, Table

LEAST_VALID = 0.95  # share of valid turns below which the prompt or the alias table should be mended first
SHOWN = 12  # of the commonest
# Beyond these a remark is made. None is a fault: they say where to look.
MOST_CAPPED, MOST_NO_OPS, MOST_COPIED, MOST_SIMILAR, MOST_ONE_ACTION, MOST_CUT = 0.05, 0.5, 0.5, 0.8, 0.9, 0.1


def make_report(title: str, look: Look, key: str, max_prompt_tokens: int, max_reply_tokens: int) -> Report:
    """Put a look at a policy into words.

    Args:
        title: of the report.
        look: what was seen.
        key: of the config, under which the source was given.
        max_prompt_tokens: limit of a prompt.
        max_reply_tokens: limit of a reply.
    """
    tables = [
        _outcome(look),
        _validity(look),
        *([_invalid(look, key)] if look.invalid.kinds else []),
        *([_table("Actions that there are not", look.invalid.invented, look.turns)] if look.invalid.invented else []),
        _failures(look),
        _actions(look),
        _thoughts(look.thoughts),
        _lengths(look, max_prompt_tokens, max_reply_tokens),
    ]
    return Report(title, tables)


def _outcome(look: Look) -> Table:
    low, high = look.interval
    share = look.successes / look.episodes if look.episodes else math.nan
    value = f"{_percent(share)} ({_percent(low)} to {_percent(high)}), {look.successes} of {look.episodes}"
    warning = ""
    if look.episodes and not look.successes and look.returns and look.returns.error == 0:
        warning = (
            "no episode succeeded and all have the same return, so there is nothing to learn from yet; begin with an "
            "easier level, or reward progress"
        )
    elif look.episodes and look.successes == look.episodes:
        warning = "every episode succeeded, so there is little left to learn; take a harder level"
    rows = [Entry("success", value, share, warning, brief=True)]
    if look.returns:
        rows.append(Entry("return", _average(look.returns)))
    rows += [Entry(name, _average(average)) for name, average in look.reported.items()]
    if look.lengths:
        rows.append(Entry("turns of an episode", _spread(look.lengths), brief=True))
    return Table("Outcome", rows, "success with its 95 % interval; means with their standard error")


def _validity(look: Look) -> Table:
    ratio = look.valid_ratio
    warning = ""
    if look.turns and ratio < LEAST_VALID:
        mend = "add the aliases that are suggested, or " if look.invalid.aliases else ""
        warning = (
            f"below {_percent(LEAST_VALID)}, so much of the training would go into the format: {mend}say more clearly "
            "in the prompt what a reply looks like"
        )
    rows = [Entry("valid actions", f"{_percent(ratio)} of {look.turns} turns", ratio, warning, brief=True)]
    rows += [Entry(kind.value, _count(n, look.turns), n / look.turns) for kind, n in look.invalid.kinds.items()]
    return Table("Valid actions", rows, "and what the other replies say")


def _invalid(look: Look, key: str) -> Table:
    texts = dict(islice(look.invalid.texts.items(), SHOWN))
    rows = [Entry(_quoted(text), _count(n, look.turns), n / look.turns) for text, n in texts.items()]
    aliases = {said: action for said, (action, _) in look.invalid.aliases.items()}
    if not aliases:
        return Table("Commonest invalid replies", rows)
    lines = [f"    {_yaml(said)}: {_yaml(action)}" for said, action in islice(aliases.items(), SHOWN)]
    about = f"aliases that would make some of them valid, for {key}:"
    return Table("Commonest invalid replies", rows, about, "\n".join(["wording:", "  aliases:", *lines]))


def _failures(look: Look) -> Table:
    failed = sum(look.failures.values())
    most = max(failed, 1)
    rows = [Entry(how.value, _count(n, failed), n / most, brief=True) for how, n in look.failures.items()]
    looped = look.failures.get(Failure.LOOP, 0) + look.failures.get(Failure.STUCK, 0)
    if rows and looped > failed / 2:
        rows.append(
            Entry("stuck or in a loop", _count(looped, failed), looped / most, "a memory of more turns may help it out")
        )
    idle = sum(look.no_ops.values())
    if look.followed:
        share = idle / look.followed
        warning = (
            f"more than {_percent(MOST_NO_OPS)} of the actions changed nothing that is shown; does the observation say "
            "what an action led to?"
            if share > MOST_NO_OPS
            else ""
        )
        rows.append(Entry("actions that changed nothing", _count(idle, look.followed), share, warning, brief=True))
        rows += [Entry(f"of these {_quoted(name)}", _count(n, idle)) for name, n in islice(look.no_ops.items(), 3)]
    return Table("How episodes failed", rows, "nothing changed: the next observation was the same")


def _actions(look: Look) -> Table:
    table = _table("Actions taken", look.actions, sum(look.actions.values()))
    rows = list(table.rows)
    if len(look.actions) > 1 and rows and (rows[0].share or 0.0) > MOST_ONE_ACTION:
        rows[0] = Entry(rows[0].name, rows[0].value, rows[0].share, "nearly every turn takes this one action")
    return Table(table.title, rows, "default actions included")


def _thoughts(found: Thoughts | None) -> Table:
    if found is None:
        return Table("Thoughts", [Entry("thoughts", "none: replies are actions alone", brief=True)])
    rows = [Entry("replies with a thought", _count(found.count, found.count + found.missing), brief=True)]
    rows += [Entry(f"distinct runs of {n} words", _percent(share), share) for n, share in found.distinct.items()]
    remarks = {
        "similar to the thought before": (found.similarity, MOST_SIMILAR, "thoughts hardly change from turn to turn"),
        "the same as the thought before": (found.equal, MOST_SIMILAR, "thoughts are repeated word for word"),
        "copied from the prompt": (found.copied, MOST_COPIED, "thoughts mostly repeat what the prompt says"),
    }
    if found.within is not None:
        rows.append(Entry("distinct word pairs within a thought", _percent(found.within), found.within))
    for name, (share, most, remark) in remarks.items():
        if share is not None:
            warning = remark if share > most else ""
            rows.append(Entry(name, _percent(share), share, warning, brief=name.startswith("copied")))
    return Table(
        "Diversity of thoughts",
        rows,
        f"similar: shared word pairs; copied: runs of {COPIED} words that stand in the prompt. Distinct runs over all "
        "thoughts together fall with their number",
    )


def _lengths(look: Look, max_prompt_tokens: int, max_reply_tokens: int) -> Table:
    rows = []
    if look.prompt_tokens:
        rows.append(Entry("prompt", f"{_spread(look.prompt_tokens)} of {max_prompt_tokens}", brief=True))
        share = look.cut / look.turns
        warning = "raise prompt.max_prompt_tokens, or shorten the memory" if share > MOST_CUT else ""
        rows.append(Entry("prompts with history cut", _count(look.cut, look.turns), share, warning))
    if look.reply_tokens:
        rows.append(Entry("reply", f"{_spread(look.reply_tokens)} of {max_reply_tokens}", brief=True))
    if look.thought_tokens:
        rows.append(Entry("thought", _spread(look.thought_tokens)))
    share = look.capped / look.turns if look.turns else 0.0
    shorter = "thoughts" if look.thought_tokens else "replies"
    warning = f"raise max_reply_tokens, or ask for shorter {shorter}" if share > MOST_CAPPED else ""
    rows.append(Entry("replies cut by their cap", _count(look.capped, look.turns), share, warning))
    return Table("Lengths in tokens", rows, "least, median, 95 %, largest")


def _table(title: str, counts: Mapping[str, int], whole: int) -> Table:
    first = islice(counts.items(), SHOWN)
    return Table(title, [Entry(_quoted(name), _count(n, whole), n / whole) for name, n in first])


def _percent(share: float) -> str:
    return "none" if math.isnan(share) else f"{100 * share:.1f} %"


def _count(count: int, whole: int) -> str:
    return f"{count} ({_percent(count / whole)})" if whole else str(count)


def _average(average: Average) -> str:
    return f"{average.mean:.3g}" + ("" if math.isnan(average.error) else f" ± {average.error:.2g}")


def _spread(spread: Spread) -> str:
    return ", ".join(f"{x:g}" for x in (spread.least, spread.median, spread.most_of_them, spread.largest))


def _quoted(text: str) -> str:
    return f"“{text if len(text) <= 100 else text[:97] + '...'}”" if text else "nothing"


def _yaml(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
