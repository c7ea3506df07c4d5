"""Mix integers as docs/FORMAT.md, section 5, writes it: with Python's integers, without a width."""


def mix(z: int) -> int:
    """Return `mix(z)`. z: below 2^64."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31
