/**
 * Gathers changes, and writes them some times a second: an answer that streams changes with each token. What could not be
 * written, as on a full disk, is kept and written with what comes next.
 */
import type { Conversation, Id, Message } from "../model/types";
import type { Changes } from "./db";

// A reload loses no more than this, and where the server keeps a journal, nothing.
const WRITE_MS = 250;
const WRITE_AGAIN_MS = 5_000; // what could not be written, where nothing changes meanwhile

export class Writer {
  #conversations = new Map<Id, Conversation>();
  #messages = new Map<Id, Message>();
  #removed = new Set<Id>();
  readonly #newest = new Map<Id, Conversation | Message>(); // of all that were written, or wait to be
  #timer: ReturnType<typeof setTimeout> | undefined;
  #last: Promise<void> = Promise.resolve();
  readonly #write: (changes: Changes) => Promise<boolean>;

  /** `write` is called with one batch after the other, and says whether it is written; why not is its own to tell. */
  constructor(write: (changes: Changes) => Promise<boolean>) {
    this.#write = write;
  }

  conversation(conversation: Conversation): void {
    this.#newest.set(conversation.id, conversation);
    this.#conversations.set(conversation.id, conversation);
    this.#soon();
  }

  message(message: Message): void {
    this.#newest.set(message.id, message);
    this.#messages.set(message.id, message);
    this.#soon();
  }

  /** Forget a conversation: what of it waits to be written is not written any more. */
  remove(id: Id): void {
    this.#conversations.delete(id);
    for (const one of [...this.#newest.values()]) {
      if (one.id !== id && !("conversation" in one && one.conversation === id)) continue;
      this.#newest.delete(one.id);
      this.#messages.delete(one.id);
    }
    this.#removed.add(id);
    this.#soon();
  }

  /** Try to write what there is now; returns when that is over, and all before it. */
  flush(): Promise<void> {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    const removed = [...this.#removed];
    const conversations = [...this.#conversations.values()];
    const messages = [...this.#messages.values()];
    this.#removed.clear();
    this.#conversations.clear();
    this.#messages.clear();
    // Begun at once, for a page that goes away has no later; transactions on the same stores keep their order. What is
    // removed has one of its own: it makes room, also where there is none for the rest.
    if (removed.length > 0) this.#begin({ conversations: [], messages: [], removed });
    if (conversations.length + messages.length > 0) this.#begin({ conversations, messages, removed: [] });
    return this.#last;
  }

  #begin(changes: Changes): void {
    const tried = this.#write(changes).then((isWritten) => isWritten || this.#takeBack(changes));
    this.#last = Promise.all([this.#last, tried]).then(() => {});
  }

  /** Have it written later, except what has changed since, or was removed. */
  #takeBack({ conversations, messages, removed }: Changes): void {
    for (const id of removed) this.#removed.add(id);
    for (const one of conversations) if (this.#newest.get(one.id) === one) this.#conversations.set(one.id, one);
    for (const one of messages) if (this.#newest.get(one.id) === one) this.#messages.set(one.id, one);
    this.#timer ??= setTimeout(() => void this.flush(), WRITE_AGAIN_MS);
  }

  #soon(): void {
    this.#timer ??= setTimeout(() => void this.flush(), WRITE_MS);
  }
}
