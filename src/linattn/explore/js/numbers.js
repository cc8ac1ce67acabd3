// Numbers as the page writes them.

/** Three digits, with an exponent for very small and very large numbers. */
export const short = (x) => (x === 0 ? "0" : Math.abs(x) < 1e-3 || Math.abs(x) >= 1e4 ? x.toExponential(2) : String(Number(x.toPrecision(3))));
