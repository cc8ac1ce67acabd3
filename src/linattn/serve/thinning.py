"""Which anchors of a long sequence are kept: all of the last ones, ever fewer of the earlier ones."""


def keep(positions: list[int], every: int) -> set[int]:
    """Of anchors at multiples of `every`, those to keep once the sequence has come to the last of them.

    Spacing doubles with the distance from the end, so that of n anchors about 2 log2(n) stay.

    >>> sorted(keep([512 * i for i in range(1, 17)], 512))
    [4096, 6144, 7168, 7680, 8192]
    """
    end = max(positions, default=0)

    def spacing(position: int) -> int:
        distance = (end - position) // every
        return every << max(0, distance.bit_length() - 1)

    return {position for position in positions if position % spacing(position) == 0}
