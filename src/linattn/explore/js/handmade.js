// Heads whose weights are set by hand: the designs of `linattn lab handmade`, built from selectors.

const GAP = 30; // scaled score by which a selected key beats the next best
const LETTERS = ["A", "B", "C"];
const WITH_CLS = ["#", ...LETTERS];
const ONE_HOT = { A: [1, 0, 0], B: [0, 1, 0], C: [0, 0, 1] };

const table = (rows, columns, chosen) => rows.map((a) => columns.map((b) => Number(chosen(a, b))));
const places = (count) => Array.from({ length: count }, (_, i) => i);
const byContent = (alphabet, chosen) => table(alphabet, alphabet, chosen);
const byPlace = (count, chosen) => table(places(count), places(count), chosen);

/** name -> selector tables (by [query][key]), values of the tokens, and what it does. */
export const DESIGNS = {
  identity: {
    about: "by contents: every token finds its like and returns it",
    alphabet: LETTERS,
    most: 6,
    content: byContent(LETTERS, (q, k) => q === k),
    values: ONE_HOT,
    example: "ABBCC",
  },
  first: {
    about: "by position: every token returns the first",
    alphabet: LETTERS,
    most: 4,
    position: byPlace(4, (q, k) => k === 0),
    values: ONE_HOT,
    example: "BCAA",
  },
  unique: {
    about: "by contents and position: +1 where a token occurs once, −1 where it has a double",
    alphabet: WITH_CLS,
    most: 4,
    prefix: "#",
    content: WITH_CLS.map((q) => WITH_CLS.map((k) => 2 * Number(q === k && k !== "#") + Number(k === "#"))),
    position: places(5).map((q) => places(5).map((k) => -2 * Number(q === k && k > 0))),
    values: { "#": [1], A: [-1], B: [-1], C: [-1] },
    example: "ABBC",
  },
  reverse: {
    about: "by position from the end: the sequence backwards",
    alphabet: LETTERS,
    most: 6,
    mirror: byPlace(6, (q, k) => q === k),
    values: ONE_HOT,
    example: "ABBCC",
  },
  previous: {
    about: "by position: every token returns the one before it",
    alphabet: LETTERS,
    most: 6,
    position: byPlace(6, (q, k) => k === Math.max(q - 1, 0)),
    values: ONE_HOT,
    example: "ABBCC",
  },
  histogram: {
    about: "counts by contents: 1 / (1 + how often the token occurs)",
    alphabet: WITH_CLS,
    most: 6,
    prefix: "#",
    content: byContent(WITH_CLS, (q, k) => k === q || k === "#"),
    values: { "#": [1], A: [0], B: [0], C: [0] },
    example: "ABBCC",
  },
};

/** The letters of a text that a design takes, or its example. */
export function readLetters(name, text) {
  const design = DESIGNS[name];
  const letters = [...text.toUpperCase()].filter((letter) => LETTERS.includes(letter)).slice(0, design.most);
  return [...(design.prefix || ""), ...(letters.length ? letters : design.example)];
}

/**
 * Queries, keys and values of a sequence. A query says what and where it is, as one-hot vectors; a key carries the scores
 * that it has for each such query.
 */
export function handmade(name, tokens) {
  const { alphabet, content, position, mirror, values } = DESIGNS[name];
  const parts = [];
  const oneHot = (size, index) => Array.from({ length: size }, (_, i) => Number(i === index));
  const n = tokens.length;
  const index = tokens.map((token) => alphabet.indexOf(token));
  if (content) parts.push([(i) => oneHot(alphabet.length, index[i]), (j) => content.map((row) => row[index[j]])]);
  if (position) parts.push([(i) => oneHot(position.length, i), (j) => position.map((row) => row[j])]);
  if (mirror) parts.push([(i) => oneHot(mirror.length, i), (j) => mirror.map((row) => row[n - 1 - j])]);
  const q = [];
  const k = [];
  const v = [];
  const dim = parts.reduce((sum, [query]) => sum + query(0).length, 0);
  const size = Math.sqrt(GAP * Math.sqrt(dim));
  tokens.forEach((token, i) => {
    for (const [query, key] of parts) {
      q.push(...query(i).map((x) => x * size));
      k.push(...key(i).map((x) => x * size));
    }
    v.push(...values[token]);
  });
  const width = v.length / n;
  return { q: Float64Array.from(q), k: Float64Array.from(k), v: Float64Array.from(v), n, dim, width, tokens };
}
