/** Files out of the page and into it. */
const NAME_MAX = 60; // characters

/** What a conversation's file is called: its title without what file systems refuse. */
export function fileNameOf(title: string): string {
  const name = title
    .replace(/[\u0000-\u001f\\/:*?"<>|]+/g, " ")
    .replace(/\s+/g, " ")
    .trim()
    .slice(0, NAME_MAX)
    .trim();
  return `${name || "chat"}.json`;
}

export function saveFile(name: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 0);
}

/** Ask the reader for files; none where the question is closed without any. */
export function askFiles(accept: string, isMultiple: boolean): Promise<File[]> {
  return new Promise((resolve) => {
    const input = document.createElement("input");
    input.type = "file";
    input.accept = accept;
    input.multiple = isMultiple;
    input.addEventListener("change", () => resolve([...(input.files ?? [])]));
    input.addEventListener("cancel", () => resolve([]));
    input.click();
  });
}

export const FILE_BYTES_MAX = 1_000_000; // more than any context takes, and still quick to read and to keep

export type ReadFile = { name: string; text: string } | { name: string; refusal: "not text" | "too large" };

/** The text of a file; what is no UTF-8, or has a zero byte, is no text. */
export async function readText(file: File): Promise<ReadFile> {
  const { name } = file;
  if (file.size > FILE_BYTES_MAX) return { name, refusal: "too large" };
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? { name, refusal: "not text" } : { name, text };
  } catch {
    return { name, refusal: "not text" };
  }
}
