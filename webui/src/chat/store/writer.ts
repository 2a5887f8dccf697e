/** Gathers changes, and writes them some times a second: an answer that streams changes with each token. */
import type { Conversation, Id, Message } from "../model/types";
import type { Changes } from "./db";

// A reload loses no more than this, and where the server keeps a journal, nothing.
const WRITE_MS = 250;

export class Writer {
  #conversations = new Map<Id, Conversation>();
  #messages = new Map<Id, Message>();
  #removed = new Set<Id>();
  #timer: ReturnType<typeof setTimeout> | undefined;
  #last: Promise<void> = Promise.resolve();
  readonly #write: (changes: Changes) => Promise<void>;

  /** `write` is called with one batch after the other; what it throws is its own to tell. */
  constructor(write: (changes: Changes) => Promise<void>) {
    this.#write = write;
  }

  conversation(conversation: Conversation): void {
    this.#conversations.set(conversation.id, conversation);
    this.#soon();
  }

  message(message: Message): void {
    this.#messages.set(message.id, message);
    this.#soon();
  }

  /** Forget a conversation: what of it waits to be written is not written any more. */
  remove(id: Id): void {
    this.#conversations.delete(id);
    for (const message of [...this.#messages.values()]) {
      if (message.conversation === id) this.#messages.delete(message.id);
    }
    this.#removed.add(id);
    this.#soon();
  }

  /** Write what there is now; returns when it is written, and all before it. */
  flush(): Promise<void> {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    const changes = {
      conversations: [...this.#conversations.values()],
      messages: [...this.#messages.values()],
      removed: [...this.#removed],
    };
    if (changes.conversations.length + changes.messages.length + changes.removed.length > 0) {
      this.#conversations.clear();
      this.#messages.clear();
      this.#removed.clear();
      // Begun at once, for a page that goes away has no later; transactions on the same stores keep their order.
      const written = this.#write(changes);
      this.#last = Promise.all([this.#last, written]).then(() => {});
    }
    return this.#last;
  }

  #soon(): void {
    this.#timer ??= setTimeout(() => void this.flush(), WRITE_MS);
  }
}
