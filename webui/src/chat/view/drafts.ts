/** What was written or attached and not sent yet, per conversation: it outlives turning to another one, and a reload of the tab. */
import { keep, kept } from "../../ui/kept";
import type { Attachment, Id } from "../model/types";

export interface Draft {
  text: string;
  attachments: Attachment[];
}

// Of a tab that has no room for it, or keeps nothing, a draft outlives turning to another conversation alone.
const drafts = new Map<Id | null, Draft>();

// Servers below one origin have conversations, and so drafts, of their own.
const written = (conversation: Id | null): string => `novainfer.draft:${location.pathname}:${conversation ?? "new"}`;
const attached = (conversation: Id | null): string =>
  `novainfer.attached:${location.pathname}:${conversation ?? "new"}`;

export function draftOf(conversation: Id | null): Draft {
  const found = drafts.get(conversation);
  if (found !== undefined) return found;
  const attachments = JSON.parse(kept(attached(conversation), true) ?? "[]") as Attachment[];
  return { text: kept(written(conversation), true) ?? "", attachments };
}

export function keepText(conversation: Id | null, text: string): void {
  drafts.set(conversation, { ...draftOf(conversation), text });
  if (keep(written(conversation), text || null, true)) return;
  keep(attached(conversation), null, true); // words have the room first
  if (!keep(written(conversation), text, true)) keep(written(conversation), null, true); // no others in their place
}

export function keepAttachments(conversation: Id | null, attachments: Attachment[]): void {
  drafts.set(conversation, { ...draftOf(conversation), attachments });
  const value = attachments.length > 0 ? JSON.stringify(attachments) : null;
  if (!keep(attached(conversation), value, true)) keep(attached(conversation), null, true);
}

export function forgetDraft(conversation: Id | null): void {
  keep(written(conversation), null, true);
  keep(attached(conversation), null, true);
  drafts.delete(conversation);
}
