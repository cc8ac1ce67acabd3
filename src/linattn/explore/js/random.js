// torch's generator for CPUs, so that a seed draws the same numbers here as in Python.

/** The Mersenne Twister of torch.Generator().manual_seed(seed). */
export class Generator {
  constructor(seed) {
    const state = new Uint32Array(624);
    state[0] = seed >>> 0;
    for (let i = 1; i < 624; i++) {
      const previous = state[i - 1] ^ (state[i - 1] >>> 30);
      state[i] = (Math.imul(1812433253, previous) + i) >>> 0;
    }
    this.state = state;
    this.next = 624;
    this.kept = null; // the second number of a pair, for the next call that draws few
  }

  /** 32 random bits. */
  bits() {
    const { state } = this;
    if (this.next === 624) {
      for (let i = 0; i < 624; i++) {
        const y = (state[i] & 0x80000000) | (state[(i + 1) % 624] & 0x7fffffff);
        state[i] = state[(i + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
      }
      this.next = 0;
    }
    let y = state[this.next++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  }

  /** Uniform in [0, 1) with 53 bits. */
  uniform() {
    const high = this.bits() & 0x1fffff;
    const low = this.bits();
    return (high * 4294967296 + low) / 9007199254740992;
  }

  /** torch.randn(n, dtype=torch.float64): Box and Muller, eight pairs at once for 16 numbers and more. */
  normal(n) {
    const out = new Float64Array(n);
    if (n < 16) {
      for (let i = 0; i < n; i++) {
        if (this.kept !== null) {
          out[i] = this.kept;
          this.kept = null;
          continue;
        }
        const angle = 2 * Math.PI * this.uniform();
        const radius = Math.sqrt(-2 * Math.log1p(-this.uniform()));
        this.kept = radius * Math.sin(angle);
        out[i] = radius * Math.cos(angle);
      }
      return out;
    }
    for (let i = 0; i < n; i++) out[i] = this.uniform();
    for (let start = 0; start + 16 <= n; start += 16) boxMuller(out, start);
    if (n % 16) {
      for (let i = n - 16; i < n; i++) out[i] = this.uniform();
      boxMuller(out, n - 16);
    }
    return out;
  }
}

function boxMuller(numbers, start) {
  for (let i = start; i < start + 8; i++) {
    const radius = Math.sqrt(-2 * Math.log(1 - numbers[i]));
    const angle = 2 * Math.PI * numbers[i + 8];
    numbers[i] = radius * Math.cos(angle);
    numbers[i + 8] = radius * Math.sin(angle);
  }
}

/** The projection (rows, dim) of Positive and Trig: normal rows, orthogonal in blocks of dim if asked for. */
export function draw(rows, dim, seed, orthogonal) {
  const generator = new Generator(seed);
  if (!orthogonal) return generator.normal(rows * dim).map(Math.fround);
  const out = new Float64Array(rows * dim);
  for (let start = 0; start < rows; start += dim) {
    const directions = orthonormalColumns(generator.normal(dim * dim), dim);
    const lengths = generator.normal(dim * dim);
    for (let i = 0; i < dim && start + i < rows; i++) {
      let square = 0;
      for (let j = 0; j < dim; j++) square += lengths[i * dim + j] ** 2;
      const length = Math.sqrt(square);
      for (let j = 0; j < dim; j++) out[(start + i) * dim + j] = Math.fround(directions[i][j] * length);
    }
  }
  return out;
}

/** Q of the QR decomposition with a positive diagonal of R, column by column (Gram-Schmidt, twice for accuracy). */
function orthonormalColumns(matrix, dim) {
  const columns = [];
  for (let c = 0; c < dim; c++) {
    const column = new Float64Array(dim);
    for (let i = 0; i < dim; i++) column[i] = matrix[i * dim + c];
    for (let pass = 0; pass < 2; pass++) {
      for (const other of columns) {
        let dot = 0;
        for (let i = 0; i < dim; i++) dot += column[i] * other[i];
        for (let i = 0; i < dim; i++) column[i] -= dot * other[i];
      }
    }
    let square = 0;
    for (let i = 0; i < dim; i++) square += column[i] ** 2;
    const length = Math.sqrt(square);
    columns.push(column.map((x) => x / length));
  }
  return columns;
}
