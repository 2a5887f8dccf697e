/**
 * The chat as the view sees it: conversations, the path of the open one, and all that can be done with them. Reading is
 * reactive; records are replaced as wholes and never changed, so that what was read stays as it was.
 */
import { SvelteMap } from "svelte/reactivity";
import { leafBelow, pathTo, shownPath, titleOf, type Shown } from "../model/conversation";
import { newAnswer, newConversation, newMessage, NO_SETTINGS } from "../model/fresh";
import type {
  Answer,
  Attachment,
  Conversation,
  Fault,
  Id,
  Message,
  Model,
  Settings,
  Status,
  Trouble,
} from "../model/types";

/** What was read from a file, or why nothing was: the first field that is not as it should be, by its path. */
export type Imported = { conversations: Id[] } | { refusal: { path: string; message: string } };

export class Chats {
  #conversations = new SvelteMap<Id, Conversation>();
  #messages = new SvelteMap<Id, Message>();
  #statuses = new SvelteMap<Id, Status>();
  #openId = $state<Id | null>(null);
  #nextSettings = $state.raw<Settings>(NO_SETTINGS);
  #latest = 0;

  /** What conversations are searched for, in titles and texts: bind a field to it. */
  query = $state("");

  /** True when what was kept has been read; before that there are no conversations. */
  isReady = $state(false);

  /** Why nothing is kept on this machine (a private window, a full disk), or null where it is. */
  unkept = $state<string | null>(null);

  /** The models of the server; empty until they are known. */
  models = $state.raw<Model[]>([]);

  /** Why the models are not known: `key` where the server wants one. */
  modelsTrouble = $state.raw<Trouble | null>(null);

  /** Whether there is a key, and whether it is kept beyond this tab. The key itself is not shown again. */
  key = $state.raw<{ isGiven: boolean; isRemembered: boolean }>({ isGiven: false, isRemembered: false });

  /** All conversations, the one that was written to last first. */
  readonly conversations: Conversation[] = $derived(
    [...this.#conversations.values()].sort((a, b) => b.changedAt - a.changedAt),
  );

  /** Those that have `query` in their title or in a message. */
  readonly found: Conversation[] = $derived(this.conversations.filter((one) => this.#matches(one)));

  /** The conversation that is shown; null: a new one, which begins with its first question. */
  readonly open: Conversation | null = $derived(
    this.#openId === null ? null : (this.#conversations.get(this.#openId) ?? null),
  );

  /** Settings of the open conversation; of the one that is about to begin where there is none. */
  readonly settings: Settings = $derived(this.open?.settings ?? this.#nextSettings);

  /** What is wrong with these settings: nothing can be asked until it is mended. */
  readonly faults: Fault[] = $derived([]);

  /** The messages that are shown, from the first question to the last answer, each with its place among its siblings. */
  readonly path: Shown[] = $derived(this.open === null ? [] : shownPath(this.#messages, this.open.id, this.open.leaf));

  /** Read what was kept, take care of answers that were cut, and ask for the models. */
  async start(): Promise<void> {
    this.isReady = true;
  }

  /** Write what is not written yet, and let go of everything. */
  async close(): Promise<void> {}

  // ---- conversations -------------------------------------------------------------------------------------------

  /** Show a conversation, or with null an empty page on which a new one begins. */
  async show(id: Id | null): Promise<void> {
    this.#openId = id;
  }

  rename(id: Id, title: string): void {
    this.#change(id, { title: title.trim(), isNamed: title.trim() !== "" });
  }

  /** Forget a conversation and all of its messages; what is being answered in it is stopped. */
  remove(id: Id): void {
    for (const message of [...this.#messages.values()]) {
      if (message.conversation !== id) continue;
      this.stop(message.id);
      this.#messages.delete(message.id);
    }
    this.#conversations.delete(id);
    if (this.#openId === id) this.#openId = null;
  }

  /** Change some settings of the open conversation, or of the next one where none is open. */
  set(change: Partial<Settings>): void {
    if (this.open === null) this.#nextSettings = { ...this.#nextSettings, ...change };
    else this.#change(this.open.id, { settings: { ...this.open.settings, ...change } });
  }

  /** Whether an answer is being made in this conversation, here or in another tab. */
  isBusy(id: Id): boolean {
    return [...this.#statuses.keys()].some((message) => this.#messages.get(message)?.conversation === id);
  }

  // ---- questions and answers -----------------------------------------------------------------------------------

  /** Ask, behind the last message that is shown; the first question begins a conversation, which is opened. */
  send(text: string, attachments: Attachment[] = []): void {
    const conversation = this.open ?? this.#begin();
    const question = this.#add(conversation.id, conversation.leaf, "user", text, attachments);
    this.#ask(question);
  }

  /** Ask a question anew with other words: a sibling of it, whose answer follows. Attachments stay unless given. */
  edit(id: Id, text: string, attachments?: Attachment[]): void {
    const old = this.#messages.get(id);
    if (old?.role !== "user") return;
    const question = this.#add(old.conversation, old.parent, "user", text, attachments ?? old.attachments);
    this.#ask(question);
  }

  /** Make another answer to the same question: a sibling of it. */
  regenerate(id: Id): void {
    const old = this.#messages.get(id);
    const question = old?.parent == null ? undefined : this.#messages.get(old.parent);
    if (old?.role === "assistant" && question !== undefined) this.#ask(question);
  }

  /** Whether an answer has an end that more could be written behind. */
  canContinue(id: Id): boolean {
    const message = this.#messages.get(id);
    const answer = message?.answer;
    return (
      answer !== undefined &&
      !this.#statuses.has(id) &&
      message!.content !== "" &&
      answer.calls.length === 0 &&
      (answer.state !== "done" || answer.finishReason === "length")
    );
  }

  /** Go on with an answer where it ends: the same message grows. */
  continue(_id: Id): void {}

  /** Ask once more for an answer that failed and has no text, in its place; now, where it waits for its turn. */
  retry(_id: Id): void {}

  /** End an answer: the server makes no more of it. Of one that waits to be asked for again, the countdown ends. */
  stop(_id: Id): void {}

  /** How an answer that is being made stands; null for all others. */
  status(id: Id): Status | null {
    return this.#statuses.get(id) ?? null;
  }

  /** Show another branch: the one through this message, as it was shown last. */
  turnTo(id: Id): void {
    const message = this.#messages.get(id);
    if (message !== undefined) this.#change(message.conversation, { leaf: leafBelow(this.#messages, id) });
  }

  // ---- tools ---------------------------------------------------------------------------------------------------

  /** What a call was answered with on the path that is shown; null where it was not yet. */
  answerOf(id: Id, callId: string): Message | null {
    const at = this.path.findIndex((shown) => shown.message.id === id);
    for (const { message } of this.path.slice(at + 1)) {
      if (message.role !== "tool") return null;
      if (message.callId === callId) return message;
    }
    return null;
  }

  /** Answer a call by hand. When all calls of the message have an answer, the model is asked to go on. */
  answerCall(_id: Id, _callId: string, _text: string): void {}

  /** Answer a call by calculating the expression in its arguments. */
  runCalculator(_id: Id, _callId: string): void {}

  // ---- the server ----------------------------------------------------------------------------------------------

  async refreshModels(): Promise<void> {}

  /** Use this key from now on, and ask again for what failed without it; with `isRemembered` it outlives this tab. */
  giveKey(key: string, isRemembered: boolean): void {
    this.key = { isGiven: key !== "", isRemembered };
  }

  forgetKey(): void {
    this.key = { isGiven: false, isRemembered: false };
  }

  // ---- files ---------------------------------------------------------------------------------------------------

  /** One conversation as the text of a file, or all of them. */
  async exported(_id?: Id): Promise<string> {
    return "";
  }

  /** Take in the text of such a file, beside what there is: under ids of its own. Nothing is taken of one with a fault. */
  async imported(_text: string): Promise<Imported> {
    return { conversations: [] };
  }

  // ---- within --------------------------------------------------------------------------------------------------

  #matches(conversation: Conversation): boolean {
    const wanted = this.query.trim().toLowerCase();
    return wanted === "" || conversation.title.toLowerCase().includes(wanted);
  }

  #begin(): Conversation {
    const conversation = newConversation(crypto.randomUUID(), this.#now(), this.#nextSettings);
    this.#conversations.set(conversation.id, conversation);
    this.#openId = conversation.id;
    return conversation;
  }

  #add(
    conversation: Id,
    parent: Id | null,
    role: Message["role"],
    content: string,
    attachments: Attachment[],
  ): Message {
    const place = { id: crypto.randomUUID(), conversation, parent, role, createdAt: this.#now() };
    const message = newMessage(place, content, attachments);
    this.#messages.set(message.id, message);
    const known = this.#conversations.get(conversation)!;
    const isFirst = role === "user" && parent === null && !known.isNamed;
    this.#change(conversation, { leaf: message.id, ...(isFirst ? { title: titleOf(content) } : {}) });
    return message;
  }

  #ask(question: Message): void {
    const settings = this.#conversations.get(question.conversation)!.settings;
    const model = settings.model ?? this.models[0]?.id ?? "";
    const message = this.#add(question.conversation, question.id, "assistant", "", []);
    this.#setAnswer(message.id, newAnswer(model, settings.seed, this.#now()));
    void pathTo;
  }

  #setAnswer(id: Id, answer: Answer): void {
    const message = this.#messages.get(id);
    if (message !== undefined) this.#messages.set(id, { ...message, answer });
  }

  #change(id: Id, change: Partial<Conversation>): void {
    const conversation = this.#conversations.get(id);
    if (conversation !== undefined) this.#conversations.set(id, { ...conversation, ...change, changedAt: this.#now() });
  }

  /** Ms since 1970, never the same twice: messages are ordered by it. */
  #now(): number {
    this.#latest = Math.max(Date.now(), this.#latest + 1);
    return this.#latest;
  }
}
