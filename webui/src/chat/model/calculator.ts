/**
 * Arithmetic for the tool that the page answers by itself: numbers, + - * / % ^ (or **), parentheses, functions and constants.
 * It reads from left to right and calculates as it goes; nothing is ever run as a script.
 *
 *     sum     = product (("+" | "-") product)*
 *     product = signed (("*" | "/" | "%") signed)*
 *     signed  = ("+" | "-") signed | power
 *     power   = atom ("^" signed)?            from the right: 2^3^2 is 2^9, and -2^2 is -4
 *     atom    = number | constant | function "(" sum ("," sum)* ")" | "(" sum ")"
 */

const FUNCTIONS: Record<string, (...given: number[]) => number> = {
  ...{ sqrt: Math.sqrt, cbrt: Math.cbrt, abs: Math.abs, floor: Math.floor, ceil: Math.ceil, trunc: Math.trunc },
  ...{ sign: Math.sign, exp: Math.exp, ln: Math.log, log10: Math.log10, log2: Math.log2, log: Math.log10 },
  ...{ sin: Math.sin, cos: Math.cos, tan: Math.tan, asin: Math.asin, acos: Math.acos, atan: Math.atan },
  ...{ min: Math.min, max: Math.max },
  round: (value, digits = 0) => Math.round(value * 10 ** digits) / 10 ** digits,
};

// How many arguments a function takes, where it is not one.
const ARITY: Record<string, [number, number]> = { round: [1, 2], min: [1, 100], max: [1, 100] };
const CONSTANTS: Record<string, number> = { pi: Math.PI, e: Math.E, tau: 2 * Math.PI };

const TOKEN =
  /\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z][A-Za-z0-9_]*)|(\*\*|[-+*/%^(),]))/y;

// A model's expression has some 30 characters; parentheses nest in the program's own stack.
const LENGTH_MAX = 1000;
const DEPTH_MAX = 100;

/** What cannot be calculated, in a sentence for the model. */
export class NotArithmetic extends Error {}

interface Token {
  kind: "number" | "name" | "sign" | "end";
  text: string;
  at: number;
}

/** The value of `expression`; throws `NotArithmetic` where it has none. */
export function calculate(expression: string): number {
  if (expression.length > LENGTH_MAX) throw new NotArithmetic(`expression is longer than ${LENGTH_MAX} characters`);
  const reader = new Reader(tokensOf(expression.replaceAll("×", "*").replaceAll("÷", "/").replaceAll("−", "-")));
  const value = reader.sum();
  reader.expect("end", "");
  if (!Number.isFinite(value)) throw new NotArithmetic("the result is not a finite number");
  return value;
}

/** The result of a call with these arguments, as the tool's message: a number, or why there is none. */
export function calculated(given: string): string {
  try {
    return written(calculate(expressionIn(given)));
  } catch (error) {
    if (error instanceof NotArithmetic) return `error: ${error.message}`;
    throw error;
  }
}

/** 0.1 + 0.2 is 0.3 to those who ask: 15 digits are what a double always has. */
function written(value: number): string {
  return String(Number(value.toPrecision(15)));
}

/** `expression`, or the only string there is. */
function expressionIn(given: string): string {
  let parsed: unknown;
  try {
    parsed = JSON.parse(given);
  } catch {
    throw new NotArithmetic("the arguments are not JSON");
  }
  if (typeof parsed === "object" && parsed !== null) {
    const { expression } = parsed as { expression?: unknown };
    if (typeof expression === "string") return expression;
    const strings = Object.values(parsed).filter((value) => typeof value === "string");
    if (strings.length === 1) return strings[0]!;
  }
  throw new NotArithmetic('the arguments must have an "expression"');
}

function tokensOf(expression: string): Token[] {
  const tokens: Token[] = [];
  TOKEN.lastIndex = 0;
  let at = 0;
  for (let found = TOKEN.exec(expression); found !== null; found = TOKEN.exec(expression)) {
    const [, number, name, sign] = found;
    const kind = number !== undefined ? "number" : name !== undefined ? "name" : "sign";
    const text = number ?? name ?? sign!;
    at = TOKEN.lastIndex;
    tokens.push({ kind, text: text === "**" ? "^" : text, at: at - text.length });
  }
  const rest = expression.slice(at).trim();
  if (rest !== "") throw new NotArithmetic(`${JSON.stringify(rest[0])} at ${at + 1} is not arithmetic`);
  return [...tokens, { kind: "end", text: "", at }];
}

class Reader {
  #at = 0;
  #depth = 0;

  constructor(readonly tokens: Token[]) {}

  sum(): number {
    if (++this.#depth > DEPTH_MAX) throw new NotArithmetic(`it nests deeper than ${DEPTH_MAX}`);
    let value = this.#product();
    for (;;) {
      if (this.#takes("+")) value += this.#product();
      else if (this.#takes("-")) value -= this.#product();
      else break;
    }
    this.#depth--;
    return value;
  }

  expect(kind: Token["kind"], text: string): void {
    const token = this.tokens[this.#at]!;
    if (token.kind !== kind || token.text !== text) throw this.#unexpected(token, text || "the end");
    this.#at++;
  }

  #product(): number {
    let value = this.#signed();
    for (;;) {
      if (this.#takes("*")) value *= this.#signed();
      else if (this.#takes("/")) value = divided(value, this.#signed());
      else if (this.#takes("%")) value = rest(value, this.#signed());
      else return value;
    }
  }

  #signed(): number {
    let isNegative = false;
    for (;;) {
      if (this.#takes("-")) isNegative = !isNegative;
      else if (!this.#takes("+")) break;
    }
    const value = this.#power();
    return isNegative ? -value : value;
  }

  #power(): number {
    const base = this.#atom();
    if (!this.#takes("^")) return base;
    if (++this.#depth > DEPTH_MAX) throw new NotArithmetic(`it nests deeper than ${DEPTH_MAX}`);
    const value = base ** this.#signed();
    this.#depth--;
    return value;
  }

  #atom(): number {
    const token = this.tokens[this.#at]!;
    this.#at++;
    if (token.kind === "number") return Number(token.text);
    if (token.kind === "name") return this.#named(token);
    if (token.kind !== "sign" || token.text !== "(") throw this.#unexpected(token, "a number");
    const value = this.sum();
    this.expect("sign", ")");
    return value;
  }

  #named({ text }: Token): number {
    const name = text.toLowerCase();
    if (Object.hasOwn(CONSTANTS, name)) return CONSTANTS[name]!;
    if (!Object.hasOwn(FUNCTIONS, name)) throw new NotArithmetic(`there is no function or constant ${text}`);
    this.expect("sign", "(");
    const given = [this.sum()];
    while (this.#takes(",")) given.push(this.sum());
    this.expect("sign", ")");
    const [least, most] = ARITY[name] ?? [1, 1];
    if (given.length < least || given.length > most) {
      throw new NotArithmetic(
        `${text} takes ${least === most ? least : `${least} to ${most}`} arguments, not ${given.length}`,
      );
    }
    return FUNCTIONS[name]!(...given);
  }

  #takes(sign: string): boolean {
    const { kind, text } = this.tokens[this.#at]!;
    const isIt = kind === "sign" && text === sign;
    if (isIt) this.#at++;
    return isIt;
  }

  #unexpected({ kind, text, at }: Token, wanted: string): NotArithmetic {
    const found = kind === "end" ? "the end" : JSON.stringify(text);
    return new NotArithmetic(`${found} at ${at + 1}, where ${wanted} should be`);
  }
}

function divided(value: number, by: number): number {
  if (by === 0) throw new NotArithmetic("division by zero");
  return value / by;
}

/** The rest has the sign of the divisor, as in mathematics and Python. */
function rest(value: number, by: number): number {
  if (by === 0) throw new NotArithmetic("division by zero");
  return ((value % by) + by) % by;
}
