/** Copying, also where the page has no secure context: a server in one's own network is often reached by plain http. */
export async function copyText(text: string): Promise<boolean> {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return false; // the reader's browser said no
    }
  }
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  const active = document.activeElement as HTMLElement | null;
  document.body.append(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  active?.focus();
  return isDone;
}
