/** The tree of a conversation's messages: which path is shown, and what the other branches are. Nothing here changes its arguments. */
import type { Id, Message } from "./types";

export type Messages = ReadonlyMap<Id, Message>;

/** Where a message stands among those with the same parent. */
export interface Siblings {
  index: number; // from 0
  count: number;
  previous: Id | null;
  next: Id | null;
}

/** A message of the path that is shown. */
export interface Shown {
  message: Message;
  siblings: Siblings;
}

/** The messages from the first question to `leaf`; as far up as there are parents. */
export function pathTo(messages: Messages, leaf: Id | null): Message[] {
  const path: Message[] = [];
  const seen = new Set<Id>();
  let message = leaf === null ? undefined : messages.get(leaf);
  while (message !== undefined && !seen.has(message.id)) {
    seen.add(message.id);
    path.push(message);
    message = message.parent === null ? undefined : messages.get(message.parent);
  }
  return path.reverse();
}

/** The messages of `conversation` by their parent, each list in the order in which they came. */
export function childrenIn(messages: Messages, conversation: Id): Map<Id | null, Message[]> {
  const children = new Map<Id | null, Message[]>();
  for (const message of messages.values()) {
    if (message.conversation !== conversation) continue;
    const list = children.get(message.parent);
    if (list === undefined) children.set(message.parent, [message]);
    else list.push(message);
  }
  for (const list of children.values()) list.sort(byAge);
  return children;
}

/** The path to `leaf` of `conversation`, each message with its place among its siblings. */
export function shownPath(messages: Messages, conversation: Id, leaf: Id | null): Shown[] {
  const children = childrenIn(messages, conversation);
  return pathTo(messages, leaf).map((message) => {
    const all = children.get(message.parent) ?? [message];
    const index = all.indexOf(message);
    return {
      message,
      siblings: {
        index,
        count: all.length,
        previous: all[index - 1]?.id ?? null,
        next: all[index + 1]?.id ?? null,
      },
    };
  });
}

/** The end of the branch below `id` that was written to last: each time the youngest child. */
export function leafBelow(messages: Messages, id: Id): Id {
  const first = messages.get(id);
  if (first === undefined) return id;
  const children = childrenIn(messages, first.conversation);
  const seen = new Set<Id>();
  let leaf = id;
  while (!seen.has(leaf)) {
    seen.add(leaf);
    leaf = children.get(leaf)?.at(-1)?.id ?? leaf;
  }
  return leaf;
}

/** Whether a message, or what is attached to it, has `text`, whatever its case. */
export function hasText({ content, attachments }: Message, text: string): boolean {
  const wanted = text.toLowerCase();
  return [content, ...attachments.map((one) => one.text)].some((one) => one.toLowerCase().includes(wanted));
}

/** What an unnamed conversation is called: the beginning of its first question, or "" before there is one. */
export function titleOf(question: string): string {
  const line = question.trim().split("\n", 1)[0]!.trim();
  const characters = [...line];
  return characters.length <= TITLE_MAX
    ? line
    : characters
        .slice(0, TITLE_MAX - 1)
        .join("")
        .trimEnd() + "…";
}

const TITLE_MAX = 60; // characters; more than fits beside a conversation on any screen

function byAge(a: Message, b: Message): number {
  return a.createdAt - b.createdAt || (a.id < b.id ? -1 : a.id > b.id ? 1 : 0);
}
