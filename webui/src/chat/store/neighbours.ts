/**
 * Other tabs of the same page. They tell each other what they have written, and each answer has one tab that makes it.
 *
 * Whose an answer is, a lock says, which the browser releases when its tab is gone. Locks need a secure context, which a
 * server in a local network by plain HTTP is not: there a tab asks the others, and takes silence for an answer.
 */
import type { Id } from "../model/types";

export type News =
  | { type: "changed"; conversations: Id[]; messages: Id[]; removed: Id[] } // read them again
  | { type: "stop"; message: Id } // an answer of yours
  | { type: "hurry"; message: Id }
  | { type: "whose"; message: Id }
  | { type: "mine"; message: Id };

export type Release = () => void;

// A tab in the background is told at once; only its timers wait.
const SILENCE_MS = 1000;
const ASK_AGAIN_MS = 5000;

export class Neighbours {
  readonly #channel: BroadcastChannel;
  readonly #locks: LockManager | undefined;
  readonly #name: string;
  readonly #own = new Set<Id>();
  #heard = new Set<Id>();
  #isClosed = false;

  constructor(name: string, hear: (news: News) => void, locks: LockManager | undefined = navigator.locks) {
    this.#name = name;
    this.#locks = locks;
    this.#channel = new BroadcastChannel(name);
    this.#channel.onmessage = ({ data }: MessageEvent<News>) => {
      if (data.type === "whose") {
        if (this.#own.has(data.message)) this.tell({ type: "mine", message: data.message });
      } else if (data.type === "mine") this.#heard.add(data.message);
      else hear(data);
    };
  }

  tell(news: News): void {
    if (!this.#isClosed) this.#channel.postMessage(news);
  }

  /** This tab makes the answer, until it is released. */
  own(id: Id): Release {
    this.#own.add(id);
    let release: Release = () => {};
    const held = new Promise<void>((resolve) => (release = resolve));
    void this.#locks?.request(this.#lock(id), () => held);
    return () => {
      this.#own.delete(id);
      release();
    };
  }

  /** Wait until no other tab makes the answer, and make it this one's; null when the page is closed before. */
  async inherit(id: Id): Promise<Release | null> {
    if (this.#locks === undefined) return this.#inheritByAsking(id);
    return new Promise((resolve) => {
      void this.#locks!.request(this.#lock(id), () => {
        if (this.#isClosed) return resolve(null);
        this.#own.add(id);
        return new Promise<void>((release) => {
          resolve(() => {
            this.#own.delete(id);
            release();
          });
        });
      });
    });
  }

  close(): void {
    this.#isClosed = true;
    this.#channel.close();
  }

  async #inheritByAsking(id: Id): Promise<Release | null> {
    for (;;) {
      this.#heard.delete(id);
      this.tell({ type: "whose", message: id });
      await pause(SILENCE_MS);
      if (this.#isClosed) return null;
      if (!this.#heard.has(id)) return this.own(id);
      await pause(ASK_AGAIN_MS);
    }
  }

  #lock(id: Id): string {
    return `${this.#name}:${id}`;
  }
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}
