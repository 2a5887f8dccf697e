/** What was written or attached and not sent yet, per conversation: it outlives turning to another one, and a reload of the tab. */
import { keep, kept } from "../../ui/kept";
import type { Attachment, Id } from "../model/types";

export interface Draft {
  text: string;
  attachments: Attachment[];
}

const written = (conversation: Id | null): string => `novainfer.draft.${conversation ?? "new"}`;
const attached = (conversation: Id | null): string => `novainfer.attached.${conversation ?? "new"}`;

// Of a tab that has no room for them they outlive turning to another conversation alone.
const attachments = new Map<Id | null, Attachment[]>();

export function draftOf(conversation: Id | null): Draft {
  const found =
    attachments.get(conversation) ?? (JSON.parse(kept(attached(conversation), true) ?? "[]") as Attachment[]);
  return { text: kept(written(conversation), true) ?? "", attachments: found };
}

/** Where the browser has no room for it, the text is still in the field. */
export function keepText(conversation: Id | null, text: string): void {
  keep(written(conversation), text || null, true);
}

export function keepAttachments(conversation: Id | null, now: Attachment[]): void {
  attachments.set(conversation, now);
  const isKept = keep(attached(conversation), now.length > 0 ? JSON.stringify(now) : null, true);
  if (!isKept) keep(attached(conversation), null, true); // no others in their place
}

export function forgetDraft(conversation: Id | null): void {
  keepText(conversation, "");
  keepAttachments(conversation, []);
  attachments.delete(conversation);
}
