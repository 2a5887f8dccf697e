import { expect, test } from "vitest";
import { calculate, calculated, NotArithmetic } from "../../../src/chat/model/calculator";

test.each([
  ["1 + 2 * 3", 7],
  ["(1 + 2) * 3", 9],
  ["10 - 4 - 3", 3],
  ["100 / 10 / 2", 5],
  ["2 ^ 3 ^ 2", 512],
  ["2 ** 10", 1024],
  ["-2 ^ 2", -4],
  ["2 ^ -1", 0.5],
  ["--3", 3],
  ["+3 - -2", 5],
  ["-7 % 3", 2],
  ["17 % 5 * 2", 4],
  ["sqrt(2) ^ 2", 2.0000000000000004],
  ["abs(-3.5) + round(2.5) + round(3.14159, 2)", 9.64],
  ["max(1, 2, min(7, 5))", 5],
  ["2 * PI", 2 * Math.PI],
  ["1.5e3 + .5", 1500.5],
  ["6 × 7 ÷ 2 − 1", 20],
])("%s is %d", (expression, value) => {
  expect(calculate(expression)).toBeCloseTo(value, 12);
});

test.each([
  ["1 +", "the end at 4, where a number should be"],
  ["(1", "the end at 3, where ) should be"],
  ["1 2", '"2" at 3, where the end should be'],
  ["1,5", '"," at 2, where the end should be'],
  ["1 / 0", "division by zero"],
  ["5 % 0", "division by zero"],
  ["sqrt(-1)", "the result is not a finite number"],
  ["10 ^ 999", "the result is not a finite number"],
  ["alert(1)", "there is no function or constant alert"],
  ["constructor(1)", "there is no function or constant constructor"],
  ["__proto__", '"_" at 1 is not arithmetic'],
  ["Math.PI", '"." at 5 is not arithmetic'],
  ["1; 2", '";" at 2 is not arithmetic'],
  ["round(1, 2, 3)", "round takes 1 to 2 arguments, not 3"],
  ["", "the end at 1, where a number should be"],
  ["(".repeat(500), "it nests deeper than 100"],
  ["2^".repeat(400) + "2", "it nests deeper than 100"],
  ["1+".repeat(1000), "expression is longer than 1000 characters"],
])("%.20s has no value", (expression, message) => {
  expect(() => calculate(expression)).toThrow(message);
  expect(() => calculate(expression)).toThrow(NotArithmetic);
});

test("a call is answered with a number, or with what is wrong with it", () => {
  expect(calculated('{"expression": "0.1 + 0.2"}')).toBe("0.3");
  expect(calculated('{"formula": "2 * 21"}')).toBe("42");
  expect(calculated('{"expression": "1 / 0"}')).toBe("error: division by zero");
  expect(calculated('{"expression": ')).toBe("error: the arguments are not JSON");
  expect(calculated("[]")).toBe('error: the arguments must have an "expression"');
  expect(calculated("null")).toBe('error: the arguments must have an "expression"');
});
