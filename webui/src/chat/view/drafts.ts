/** What was written and not sent yet, per conversation: it outlives turning to another one, and a reload of the tab. */
import type { Id } from "../model/types";

const key = (conversation: Id | null): string => `novainfer.draft.${conversation ?? "new"}`;

export function draftOf(conversation: Id | null): string {
  return sessionStorage.getItem(key(conversation)) ?? "";
}

export function keepDraft(conversation: Id | null, text: string): void {
  if (text === "") sessionStorage.removeItem(key(conversation));
  else
    try {
      sessionStorage.setItem(key(conversation), text);
    } catch {
      // The browser's room for it is full: the text is still in the field.
    }
}
