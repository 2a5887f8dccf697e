/** What was written and not sent yet, per conversation: it outlives turning to another one, and a reload of the tab. */
import { keep, kept } from "../../ui/kept";
import type { Id } from "../model/types";

const key = (conversation: Id | null): string => `novainfer.draft.${conversation ?? "new"}`;

export function draftOf(conversation: Id | null): string {
  return kept(key(conversation), true) ?? "";
}

/** Where the browser has no room for it, the text is still in the field. */
export function keepDraft(conversation: Id | null, text: string): void {
  keep(key(conversation), text || null, true);
}
