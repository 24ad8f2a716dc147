"""What a configuration can have against itself and against tp: lines for people. No torch."""


def not_positive(section: str, config: object, *names: str) -> list[str]:
    """A line for each of these that is zero, less, or no number."""
    return [
        f"{section}.{name} {value} is not positive"
        for name in names
        if not (value := getattr(config, name)) > 0
    ]


def negative(section: str, config: object, *names: str) -> list[str]:
    """A line for each of these that is below zero, or no number."""
    return [
        f"{section}.{name} {value} is negative or no number"
        for name in names
        if not (value := getattr(config, name)) >= 0
    ]


def indivisible(config: object, tp: int, *names: str) -> list[str]:
    """A line for each of these sizes that tp does not divide, with the tps that do."""
    found = []
    for name in names:
        size = getattr(config, name)
        if size % tp:
            fits = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
            found.append(f"{name} {size} is not divisible by tp {tp}: use tp {fits}")
    return found


def rowless(config: object, tp: int, *names: str) -> list[str]:
    """A line for each table of so many rows that would leave a rank without one, by the ⌈rows/tp⌉ split."""
    return [
        f"{name} {rows} leaves ranks of tp {tp} without a row"
        for name in names
        if -(-(rows := getattr(config, name)) // tp) * (tp - 1) >= rows
    ]
