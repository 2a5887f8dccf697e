/** 128 bits by chance, in hex. Not `randomUUID`: browsers have it for pages by HTTPS only, and many a server is by plain HTTP. */
export function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A seed that fits in 31 bits, as the engine draws them. */
export function newSeed(): number {
  return crypto.getRandomValues(new Uint32Array(1))[0]! >>> 1;
}
