"""Whole numbers that remember which letters they were made of, so that a size can be printed as its formula."""

from typing import Any

ORDER = ("B", "S", "L", "E", "A", "K", "D", "Dn", "Dr", "Dv", "Rq", "Rk", "H", "F", "Fe", "V")
"""Letters from the outside of a shape to its inside."""
Terms = dict[tuple[str, ...], int]


class Letters(int):
    """A number with its polynomial in letters; what cannot be written as one goes on as a plain number."""

    terms: Terms

    @staticmethod
    def of(value: int, name: str) -> "Letters":
        """The letter `name`, which is `value`."""
        return make(value, {(name,): 1})

    def __add__(self, other: Any) -> Any:
        if isinstance(other, float):
            return int(self) + other
        value = int(self) + int(other)
        summed = dict(self.terms)
        for letters, factor in terms_of(other).items():
            summed[letters] = summed.get(letters, 0) + factor
        return make(value, summed)

    __radd__ = __add__

    def __neg__(self) -> Any:
        return make(-int(self), {letters: -factor for letters, factor in self.terms.items()})

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, float):
            return int(self) * other
        product: Terms = {}
        for letters, factor in self.terms.items():
            for more, times in terms_of(other).items():
                key = tuple(sorted(letters + more))
                product[key] = product.get(key, 0) + factor * times
        return make(int(self) * int(other), product)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        divisor = terms_of(other)
        value = int(self) // int(other)
        if len(divisor) != 1 or value * int(other) != int(self):
            return value
        ((letters, factor),) = divisor.items()
        quotient: Terms = {}
        for own, times in self.terms.items():
            left = list(own)
            for letter in letters:
                if letter not in left:
                    return value
                left.remove(letter)
            if times % factor:
                return value
            quotient[tuple(left)] = times // factor
        return make(value, quotient)


def make(value: int, terms: Terms) -> Any:
    """A number of `terms`; a plain one where no letter is left."""
    terms = {letters: factor for letters, factor in terms.items() if factor}
    if not any(terms):
        return value
    number = Letters(value)
    number.terms = terms
    return number


def terms_of(value: Any) -> Terms:
    """The polynomial of a number."""
    return value.terms if isinstance(value, Letters) else {(): int(value)}


def text(value: Any) -> str:
    """`B*S*(2*F + H)` as its terms: `2*B*S*F + B*S*H`; a plain number as digits."""
    if not isinstance(value, Letters):
        return f"{value:,}"
    parts = []
    for letters, factor in sorted(value.terms.items(), key=lambda term: (-len(term[0]), term[0])):
        product = "*".join(sorted(letters, key=ORDER.index))
        parts.append(product if factor == 1 and letters else f"{factor:,}*{product}" if letters else f"{factor:,}")
    return " + ".join(parts)
