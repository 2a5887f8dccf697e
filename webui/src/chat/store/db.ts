/** Conversations and their messages in IndexedDB. A transaction writes all that belongs together, so that a text and how far it is agree. */
import { openDB, type DBSchema, type IDBPDatabase } from "idb";
import { hasText } from "../model/conversation";
import type { Conversation, Id, Message } from "../model/types";

const VERSION = 1;

interface Schema extends DBSchema {
  conversations: { key: Id; value: Conversation };
  messages: { key: Id; value: Message; indexes: { conversation: Id; state: string } };
}

/** What is written, or was: whole records, and the conversations that are forgotten with all they have. */
export interface Changes {
  conversations: Conversation[];
  messages: Message[];
  removed: Id[];
}

export class Database {
  private constructor(readonly db: IDBPDatabase<Schema>) {}

  /** Throws a `DOMException` where the browser keeps nothing (some private windows). */
  static async open(name: string): Promise<Database> {
    const db = await openDB<Schema>(name, VERSION, {
      upgrade(fresh) {
        fresh.createObjectStore("conversations", { keyPath: "id" });
        const messages = fresh.createObjectStore("messages", { keyPath: "id" });
        messages.createIndex("conversation", "conversation");
        messages.createIndex("state", "answer.state"); // of answers only: others have no such field
      },
      // A page of a newer version wants to change the tables: this one lets go, and says so when it writes.
      blocking: (_current, _next, event) => (event.target as IDBDatabase).close(),
    });
    return new Database(db);
  }

  conversations(): Promise<Conversation[]> {
    return this.db.getAll("conversations");
  }

  conversation(id: Id): Promise<Conversation | undefined> {
    return this.db.get("conversations", id);
  }

  message(id: Id): Promise<Message | undefined> {
    return this.db.get("messages", id);
  }

  messagesIn(conversation: Id): Promise<Message[]> {
    return this.db.getAllFromIndex("messages", "conversation", conversation);
  }

  /** Answers that are being made, or were when their page went away. */
  async unfinished(): Promise<Message[]> {
    const { store } = this.db.transaction("messages");
    const index = store.index("state");
    const [waiting, streaming] = await Promise.all([index.getAll("waiting"), index.getAll("streaming")]);
    return [...waiting, ...streaming];
  }

  /** The conversations with `text` in a message, whatever its case. One message at a time: a long past is not held at once. */
  async having(text: string): Promise<Set<Id>> {
    const found = new Set<Id>();
    for await (const cursor of this.db.transaction("messages").store) {
      const { conversation } = cursor.value;
      if (!found.has(conversation) && hasText(cursor.value, text)) found.add(conversation);
    }
    return found;
  }

  /** All of it or nothing; throws a `DOMException` where there is no room. */
  async write({ conversations, messages, removed }: Changes): Promise<void> {
    const transaction = this.db.transaction(["conversations", "messages"], "readwrite", { durability: "relaxed" });
    const kept = transaction.objectStore("messages");
    const work: Promise<unknown>[] = [];
    for (const id of removed) {
      work.push(transaction.objectStore("conversations").delete(id));
      work.push(
        kept
          .index("conversation")
          .getAllKeys(id)
          .then((keys) => Promise.all(keys.map((key) => kept.delete(key)))),
      );
    }
    for (const conversation of conversations) work.push(transaction.objectStore("conversations").put(conversation));
    for (const message of messages) work.push(kept.put(message));
    // Of a page that goes away only what was told to commit is kept. What is removed is looked up first: it ends by itself.
    if (removed.length === 0) transaction.commit();
    await Promise.all([...work, transaction.done]);
  }

  close(): void {
    this.db.close();
  }
}
