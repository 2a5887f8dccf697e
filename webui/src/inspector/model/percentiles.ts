/** Percentiles of what is shown, by nearest rank: each is a value that was seen. */
import type { Percentiles } from "../wire";

export function percentiles(values: readonly number[]): Percentiles | null {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const rank = (share: number) => sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)]!;
  return { p50: rank(0.5), p95: rank(0.95), p99: rank(0.99) };
}
