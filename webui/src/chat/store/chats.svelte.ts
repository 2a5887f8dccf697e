/**
 * The chat as the view sees it: conversations, the path of the open one, and all that can be done with them. Reading is
 * reactive; records are replaced as wholes and never changed, so that what was read stays as it was.
 */
import { SvelteMap } from "svelte/reactivity";
import { baseOf, Client, Refused } from "../../api/client";
import { Answering } from "../model/answering";
import { calculated } from "../model/calculator";
import { hasText, leafBelow, pathTo, shownPath, titleOf, type Shown } from "../model/conversation";
import { newAnswer, newConversation, newMessage, NO_SETTINGS } from "../model/fresh";
import { newId, newSeed } from "../model/ids";
import { faultsOf, nameOf, requestOf } from "../model/request";
import { troubleOf } from "../model/trouble";
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
  ToolCall,
  Trouble,
} from "../model/types";
import { archiveOf, Unfit, unarchived } from "./archive";
import { Database, type Changes } from "./db";
import { Keys, type KeyState } from "./keys";
import { Neighbours, type News, type Release } from "./neighbours";
import { Writer } from "./writer";

/** What was read from a file, or why nothing was: the first field that is not as it should be, by its path. */
export type Imported = { conversations: Id[] } | { refusal: { path: string; message: string } };

// Of a model that calls and calls: what it has learned in as many turns it will not learn in more.
const CALCULATOR_TURNS_MAX = 16;
const SEARCH_MS = 200; // after the last key

export class Chats {
  #conversations = new SvelteMap<Id, Conversation>();
  #messages = new SvelteMap<Id, Message>();
  #statuses = new SvelteMap<Id, Status>();
  #openId = $state<Id | null>(null);
  #nextSettings = $state.raw<Settings>(NO_SETTINGS);
  #query = $state("");
  #inTexts = $state.raw<ReadonlySet<Id>>(new Set());

  readonly #name: string;
  readonly #keys = new Keys();
  readonly #client: Client;
  readonly #answerings = new Map<Id, { answering: Answering; release: Release }>();
  readonly #loaded = new Set<Id>();
  readonly #loading = new Set<Id>();
  readonly #inheriting = new Set<Id>();
  readonly #writer = new Writer((changes) => this.#write(changes));
  readonly #pagehide = (): void => this.#leave();
  readonly #pageshow = (event: PageTransitionEvent): void => void (event.persisted && this.#comeBack());
  #database: Database | null = null;
  #neighbours: Neighbours | null = null;
  #searching: ReturnType<typeof setTimeout> | undefined;
  #latest = 0;
  #wishedId: Id | null = null;

  /** True when what was kept has been read; before that there are no conversations. */
  isReady = $state(false);

  /** Why nothing is kept on this machine (a private window, a full disk), or null where it is. */
  unkept = $state<string | null>(null);

  /** The models of the server; empty until they are known. */
  models = $state.raw<Model[]>([]);

  /** Why the models are not known: `key` where the server wants one. */
  modelsTrouble = $state.raw<Trouble | null>(null);

  /** Whether there is a key, and whether it is kept beyond this tab. The key itself is not shown again. */
  key = $state.raw<KeyState>(this.#keys.state);

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
  readonly faults: Fault[] = $derived(faultsOf(this.settings));

  /** The messages that are shown, from the first question to the last answer, each with its place among its siblings. */
  readonly path: Shown[] = $derived(this.open === null ? [] : shownPath(this.#messages, this.open.id, this.open.leaf));

  /** For a page at `href`; what is kept is kept for the server that this page is of. */
  constructor(href: string = location.href, fetcher?: typeof fetch) {
    const base = baseOf(href);
    const { pathname } = new URL(base);
    this.#name = pathname === "/" ? "novainfer" : `novainfer:${pathname}`;
    this.#client = new Client(base, () => this.#keys.value, fetcher);
  }

  /** Read what was kept, take care of answers that were cut, and ask for the models. */
  async start(): Promise<void> {
    void this.refreshModels();
    this.#neighbours = new Neighbours(this.#name, (news) => void this.#hear(news));
    addEventListener("pagehide", this.#pagehide);
    addEventListener("pageshow", this.#pageshow);
    try {
      this.#database = await Database.open(this.#name);
      for (const conversation of await this.#database.conversations()) {
        if (!this.#conversations.has(conversation.id)) this.#conversations.set(conversation.id, conversation);
      }
      for (const message of await this.#database.unfinished()) void this.#inherit(message.id);
    } catch (error) {
      this.#database = null;
      this.unkept = messageOf(error);
    }
    this.isReady = true;
  }

  /** Write what is not written yet, and let go of everything; answers that are being made are left as they are. */
  async close(): Promise<void> {
    removeEventListener("pagehide", this.#pagehide);
    removeEventListener("pageshow", this.#pageshow);
    clearTimeout(this.#searching);
    this.#leave();
    await this.#writer.flush();
    for (const { release } of this.#answerings.values()) release();
    this.#neighbours?.close();
    this.#database?.close();
  }

  // ---- conversations -------------------------------------------------------------------------------------------

  /** Show a conversation, or with null an empty page on which a new one begins. */
  async show(id: Id | null): Promise<void> {
    this.#wishedId = id;
    if (id !== null) await this.#load(id);
    if (this.#wishedId === id) this.#openId = id; // else another one was wished for meanwhile
  }

  rename(id: Id, title: string): void {
    const name = title.trim();
    const first = [...this.#messages.values()].find((one) => one.conversation === id && one.parent === null);
    this.#change(id, { title: name || titleOf(first?.content ?? ""), isNamed: name !== "" });
  }

  /** Forget a conversation and all of its messages; what is being answered in it is stopped. */
  remove(id: Id): void {
    this.#forget(id);
    this.#writer.remove(id);
    void this.#writer.flush();
  }

  /** Change some settings of the open conversation, or of the next one where none is open. */
  set(given: Partial<Settings>): void {
    const change = $state.snapshot(given) as Partial<Settings>; // a view's own state cannot be kept as it is
    if (this.open === null) this.#nextSettings = { ...this.#nextSettings, ...change };
    else this.#change(this.open.id, { settings: { ...this.open.settings, ...change } });
  }

  /** What conversations are searched for, in titles and texts: bind a field to it. */
  get query(): string {
    return this.#query;
  }

  set query(query: string) {
    this.#query = query;
    this.#inTexts = new Set();
    clearTimeout(this.#searching);
    if (query.trim() !== "") this.#searching = setTimeout(() => void this.#search(query), SEARCH_MS);
  }

  /** Whether an answer is being made in this conversation, by this tab. */
  isBusy(id: Id): boolean {
    for (const message of this.#statuses.keys()) if (this.#messages.get(message)?.conversation === id) return true;
    return false;
  }

  // ---- questions and answers -----------------------------------------------------------------------------------

  /**
   * Ask, behind the last message that is shown; the first question begins a conversation, which is opened. False, and
   * nothing else, while the last answer is being made.
   */
  send(text: string, attachments: Attachment[] = []): boolean {
    const conversation = this.open ?? this.#begin();
    if (conversation.leaf !== null && this.status(conversation.leaf) !== null) return false;
    const question = this.#add(conversation.id, conversation.leaf, "user", text, $state.snapshot(attachments));
    this.#ask(question);
    void this.#writer.flush(); // what somebody has written does not wait
    return true;
  }

  /** Ask a question anew with other words: a sibling of it, whose answer follows. Attachments stay unless given. */
  edit(id: Id, text: string, attachments?: Attachment[]): void {
    const old = this.#messages.get(id);
    if (old?.role !== "user") return;
    const question = this.#add(
      old.conversation,
      old.parent,
      "user",
      text,
      $state.snapshot(attachments) ?? old.attachments,
    );
    this.#ask(question);
  }

  /** Make another answer to the same question: a sibling of it. */
  regenerate(id: Id): void {
    const old = this.#messages.get(id);
    const question = old?.parent == null ? undefined : this.#messages.get(old.parent);
    if (old?.role === "assistant" && question !== undefined) this.#ask(question);
  }

  /**
   * Whether an answer has an end that more could be written behind. One that a schema holds has not: what follows it
   * would have to fit the schema from its beginning.
   */
  canContinue(id: Id): boolean {
    const message = this.#messages.get(id);
    if (message?.answer === undefined || this.status(id) !== null || message.content === "") return false;
    const { calls, state, finishReason } = message.answer;
    const isHeld = this.#conversations.get(message.conversation)?.settings.schema.trim() !== "";
    return !isHeld && calls.length === 0 && (state !== "done" || finishReason === "length");
  }

  /** Go on with an answer where it ends: the same message grows. */
  continue(id: Id): void {
    const message = this.#messages.get(id);
    if (message?.answer === undefined || !this.canContinue(id)) return;
    const { model, reasoning, tokens } = message.answer;
    const settings = this.#conversations.get(message.conversation)!.settings;
    const answer = { ...newAnswer(model, settings.seed ?? newSeed(), this.#now()), reasoning, tokens };
    this.#make({ ...message, answer }, pathTo(this.#messages, id), true);
  }

  /** Whether an answer failed before it had a text, so that it can be asked for in its place. */
  canRetry(id: Id): boolean {
    const message = this.#messages.get(id);
    const state = message?.answer?.state;
    const hasEnded = state === "failed" || state === "cut" || state === "stopped";
    return (
      this.#statuses.get(id)?.phase === "retrying" || (hasEnded && message!.content === "" && this.status(id) === null)
    );
  }

  /** Ask once more for an answer that failed and has no text, in its place; now, where it waits for its turn. */
  retry(id: Id): void {
    const status = this.status(id);
    if (status !== null) {
      this.#answerings.get(id)?.answering.hurry();
      if (!status.isOurs) this.#neighbours?.tell({ type: "hurry", message: id });
      return;
    }
    const message = this.#messages.get(id);
    if (message?.parent == null || !this.canRetry(id)) return;
    this.#make({ ...message, answer: this.#fresh(message.conversation) }, pathTo(this.#messages, message.parent));
  }

  /** End an answer: the server makes no more of it. Of one that waits to be asked for again, the countdown ends. */
  stop(id: Id): void {
    const own = this.#answerings.get(id);
    if (own !== undefined) own.answering.stop();
    else if (this.status(id) !== null) this.#neighbours?.tell({ type: "stop", message: id });
  }

  /** How an answer that is being made stands; null for all others. */
  status(id: Id): Status | null {
    const own = this.#statuses.get(id);
    if (own !== undefined) return own;
    const state = this.#messages.get(id)?.answer?.state;
    return state === "waiting" || state === "streaming"
      ? { phase: state, retryAt: null, tries: 0, isOurs: false }
      : null;
  }

  /** Show another branch: the one through this message, as far as it was written last. */
  turnTo(id: Id): void {
    const message = this.#messages.get(id);
    if (message !== undefined) this.#change(message.conversation, { leaf: leafBelow(this.#messages, id) }, false);
  }

  // ---- tools ---------------------------------------------------------------------------------------------------

  /** What a call was answered with on the path that is shown; null where it was not yet. */
  answerOf(id: Id, callId: string): Message | null {
    const shown = this.path.map(({ message }) => message);
    return resultsBehind(shown, id).find((result) => result.callId === callId) ?? null;
  }

  /** Answer a call by hand. When all calls of the message have an answer, the model is asked to go on. */
  answerCall(id: Id, callId: string, text: string): void {
    const message = this.#messages.get(id);
    const shown = this.path.map((one) => one.message);
    if (message?.answer === undefined || !shown.includes(message) || this.status(id) !== null) return;
    const results = resultsBehind(shown, id);
    const known = results.find((result) => result.callId === callId);
    // Another answer to the same call is a branch beside the first.
    const parent = known === undefined ? (results.at(-1)?.id ?? id) : known.parent!;
    const isKnown = message.answer.calls.some((call) => call.id === callId);
    if (isKnown) this.#addResult(message, parent, callId, text);
  }

  /** Answer a call by calculating the expression in its arguments. */
  runCalculator(id: Id, callId: string): void {
    const call = this.#messages.get(id)?.answer?.calls.find((one) => one.id === callId);
    if (call !== undefined) this.answerCall(id, callId, calculated(call.arguments));
  }

  // ---- the server ----------------------------------------------------------------------------------------------

  /** Ask for the models again. */
  async refreshModels(): Promise<void> {
    try {
      this.models = (await this.#client.models()).map((card) => ({
        id: card.id,
        contextLength: card.max_model_len,
        hasTools: card.tool_call_parser !== null,
        hasReasoning: card.reasoning_parser !== null,
        isLoaded: (card.status?.value ?? "loaded") === "loaded",
      }));
      this.modelsTrouble = null;
    } catch (error) {
      const isRefused = error instanceof Refused;
      this.modelsTrouble = isRefused
        ? troubleOf(error.refusal, Date.now())
        : { kind: "connection", message: messageOf(error) };
    }
  }

  /** Use this key from now on, and ask again for what failed without it; with `isRemembered` it outlives this tab. */
  giveKey(key: string, isRemembered: boolean): void {
    this.#keys.give(key.trim(), isRemembered);
    this.key = this.#keys.state;
    void this.#askAgain();
  }

  /** What failed without a key: of several models the answer's has to be known first. */
  async #askAgain(): Promise<void> {
    await this.refreshModels();
    const leaf = this.open?.leaf ?? null;
    if (leaf !== null && this.#messages.get(leaf)?.answer?.trouble?.kind === "key") this.retry(leaf);
  }

  forgetKey(): void {
    this.#keys.forget();
    this.key = this.#keys.state;
  }

  // ---- files ---------------------------------------------------------------------------------------------------

  /** One conversation as the text of a file, or all of them. */
  async exported(id?: Id): Promise<string> {
    await this.#writer.flush();
    const wanted = id === undefined ? this.conversations : this.conversations.filter((one) => one.id === id);
    const all = [];
    for (const conversation of wanted) {
      all.push({ conversation, messages: await this.#messagesIn(conversation.id) });
    }
    return archiveOf(all, Date.now());
  }

  /** Take in the text of such a file, beside what there is: under ids of its own. Nothing is taken of one with a fault. */
  async imported(text: string): Promise<Imported> {
    try {
      const archived = unarchived(text, newId);
      for (const { conversation, messages } of archived) {
        this.#loaded.add(conversation.id);
        this.#keepConversation(conversation);
        for (const message of messages) this.#keepMessage(message);
      }
      await this.#writer.flush();
      if (this.#query.trim() !== "") await this.#search(this.#query); // what is new may have it, too
      return { conversations: archived.map(({ conversation }) => conversation.id) };
    } catch (error) {
      if (error instanceof Unfit) return { refusal: { path: error.path, message: error.message } };
      throw error;
    }
  }

  // ---- asking --------------------------------------------------------------------------------------------------

  #fresh(conversation: Id): Answer {
    const { settings } = this.#conversations.get(conversation)!;
    return newAnswer(settings.model ?? this.models[0]?.id ?? "", settings.seed ?? newSeed(), this.#now());
  }

  /** Begin an answer behind `question`, which is shown; where somebody looks at another branch, in the background. */
  #ask(question: Message, isShown = true): void {
    const message = this.#add(question.conversation, question.id, "assistant", "", [], isShown);
    this.#make({ ...message, answer: this.#fresh(question.conversation) }, pathTo(this.#messages, question.id));
  }

  /** Ask for the answer in `message`, which stands behind `path`, or ends it where it goes on. */
  #make(message: Message, path: Message[], isContinued = false): void {
    const settings = this.#conversations.get(message.conversation)!.settings;
    const [fault] = faultsOf(settings);
    const answer = message.answer!;
    if (fault !== undefined) {
      const trouble: Trouble = { kind: "refused", message: fault.message, param: fault.field };
      this.#keepMessage({ ...message, answer: { ...answer, state: "failed", trouble, endedMs: 0 } });
      return;
    }
    const known = { ...settings, model: answer.model === "" ? null : answer.model };
    this.#run(message, requestOf(known, path, answer.seed!, isContinued));
  }

  #run(message: Message, body: ReturnType<typeof requestOf> | null, owned?: Release): void {
    const { id } = message;
    const release = owned ?? this.#neighbours?.own(id) ?? (() => {});
    // The first that is told is told while it is made.
    const answering = new Answering(this.#client, message, body, (grown, status) => {
      this.#keepMessage(grown);
      if (status !== null) {
        this.#statuses.set(id, status);
        return;
      }
      this.#statuses.delete(id);
      this.#answerings.delete(id);
      void this.#writer.flush().then(release);
      if (grown.answer!.state === "done") this.#calculate(grown);
    });
    if (this.#statuses.has(id)) this.#answerings.set(id, { answering, release });
  }

  /** Answer the calls that this page answers by itself, a number of times between two questions. */
  #calculate(message: Message): void {
    const { calls } = message.answer!;
    const settings = this.#conversations.get(message.conversation)?.settings;
    if (calls.length === 0 || settings === undefined) return;
    const path = pathTo(this.#messages, message.id);
    const turns = path
      .slice(path.findLastIndex(({ role }) => role === "user"))
      .filter(({ answer }) => answer !== undefined);
    if (turns.length > CALCULATOR_TURNS_MAX) return;
    const own = settings.tools.filter(({ runs, isOn }) => isOn && runs === "calculator").map(nameOf);
    let parent = message.id;
    for (const call of calls) {
      if (own.includes(call.name)) parent = this.#addResult(message, parent, call.id, calculated(call.arguments)).id;
    }
  }

  /** Hang the result of a call behind `parent`, and let the model go on when it is the last. */
  #addResult(message: Message, parent: Id, callId: string, text: string): Message {
    const isShown =
      this.#conversations.get(message.conversation)!.leaf === parent || this.open?.id === message.conversation;
    const result = this.#add(message.conversation, parent, "tool", text, [], isShown, callId);
    const results = resultsBehind(pathTo(this.#messages, result.id), message.id);
    const isLast = message.answer!.calls.every((call: ToolCall) => results.some((one) => one.callId === call.id));
    if (isLast) this.#ask(result, isShown);
    return result;
  }

  // ---- keeping -------------------------------------------------------------------------------------------------

  #matches(conversation: Conversation): boolean {
    const wanted = this.#query.trim().toLowerCase();
    return wanted === "" || conversation.title.toLowerCase().includes(wanted) || this.#inTexts.has(conversation.id);
  }

  async #search(query: string): Promise<void> {
    const wanted = query.trim();
    await this.#writer.flush();
    const found = (await this.#database?.having(wanted)) ?? new Set<Id>();
    // What could not be written is only here.
    for (const message of this.#messages.values()) if (hasText(message, wanted)) found.add(message.conversation);
    if (this.#query === query) this.#inTexts = found;
  }

  #begin(): Conversation {
    const conversation = newConversation(newId(), this.#now(), this.#nextSettings);
    this.#loaded.add(conversation.id);
    this.#keepConversation(conversation);
    this.#openId = this.#wishedId = conversation.id;
    return conversation;
  }

  #add(
    conversation: Id,
    parent: Id | null,
    role: Message["role"],
    content: string,
    attachments: Attachment[],
    isShown = true,
    callId?: string,
  ): Message {
    const message = newMessage(
      { id: newId(), conversation, parent, role, createdAt: this.#now() },
      content,
      attachments,
    );
    if (callId !== undefined) message.callId = callId;
    this.#keepMessage(message);
    const isFirst = role === "user" && parent === null && !this.#conversations.get(conversation)!.isNamed;
    const title = isFirst ? { title: titleOf(content) } : {};
    this.#change(conversation, { ...(isShown ? { leaf: message.id } : {}), ...title });
    return message;
  }

  #change(id: Id, change: Partial<Conversation>, isWritten = true): void {
    const conversation = this.#conversations.get(id);
    if (conversation === undefined) return;
    const changedAt = isWritten ? this.#now() : conversation.changedAt;
    this.#keepConversation({ ...conversation, ...change, changedAt });
  }

  #keepConversation(conversation: Conversation): void {
    this.#conversations.set(conversation.id, conversation);
    this.#writer.conversation(conversation);
  }

  #keepMessage(message: Message): void {
    if (!this.#conversations.has(message.conversation)) return; // it was removed while its answer was made
    this.#messages.set(message.id, message);
    this.#writer.message(message);
  }

  #forget(id: Id): void {
    this.#conversations.delete(id); // first: what ends now is not kept
    for (const message of [...this.#messages.values()]) {
      if (message.conversation !== id) continue;
      this.#answerings.get(message.id)?.answering.stop();
      this.#messages.delete(message.id);
    }
    this.#loaded.delete(id);
    if (this.#openId === id) this.#openId = null;
  }

  /** The page goes away. Its connections go before it does, which is no trouble of an answer: what is kept says how far each came. */
  #leave(): void {
    for (const { answering } of this.#answerings.values()) answering.abandon();
    void this.#writer.flush();
  }

  /** A page that the browser had put by is shown again, without the connections that it had. */
  #comeBack(): void {
    for (const [id, { release }] of [...this.#answerings]) {
      this.#answerings.delete(id);
      this.#statuses.delete(id);
      release();
      void this.#inherit(id);
    }
  }

  async #load(id: Id): Promise<void> {
    if (this.#loaded.has(id) || this.#database === null) return;
    this.#loading.add(id); // from here on it hears what is new
    const messages = await this.#database.messagesIn(id);
    this.#loading.delete(id);
    if (this.#loaded.has(id)) return;
    this.#loaded.add(id);
    // What is known already is newer than what was read: an answer that is being made, or was found to be cut.
    for (const message of messages) if (!this.#messages.has(message.id)) this.#messages.set(message.id, message);
  }

  async #messagesIn(id: Id): Promise<Message[]> {
    const kept = (await this.#database?.messagesIn(id)) ?? [];
    const known = [...this.#messages.values()].filter(({ conversation }) => conversation === id);
    // What is known here is the newer: it may be of what could not be written.
    return [...new Map([...kept, ...known].map((message) => [message.id, message])).values()];
  }

  /** Whether it is written; what is not stays with the writer, and `unkept` says so until some of it is. */
  async #write(changes: Changes): Promise<boolean> {
    if (this.#database === null) return this.isReady; // before it is open all waits; where there is none, nothing does
    try {
      await this.#database.write(changes);
      this.unkept = null;
    } catch (error) {
      this.unkept = messageOf(error);
      return false;
    }
    this.#neighbours?.tell({
      type: "changed",
      conversations: changes.conversations.map(({ id }) => id),
      messages: changes.messages.map(({ id }) => id),
      removed: changes.removed,
    });
    return true;
  }

  // ---- other tabs ----------------------------------------------------------------------------------------------

  async #hear(news: News): Promise<void> {
    if (news.type === "stop") this.#answerings.get(news.message)?.answering.stop();
    if (news.type === "hurry") this.#answerings.get(news.message)?.answering.hurry();
    if (news.type !== "changed" || this.#database === null) return;
    for (const id of news.removed) this.#forget(id);
    for (const id of news.messages) {
      const message = await this.#database.message(id);
      if (message === undefined || this.#answerings.has(id)) continue;
      const { conversation } = message;
      const isWanted = this.#loaded.has(conversation) || this.#loading.has(conversation) || this.#messages.has(id);
      if (isWanted) this.#messages.set(id, message);
      const state = message.answer?.state;
      if (state === "waiting" || state === "streaming") void this.#inherit(id);
    }
    for (const id of news.conversations) {
      const conversation = await this.#database.conversation(id);
      if (conversation === undefined) continue;
      // Each tab shows the branch that it shows, unless there is nothing of it any more.
      const known = this.#conversations.get(id);
      const isOpen = known !== undefined && this.#openId === id && known.leaf !== null;
      const leaf = isOpen && !isAbove(this.#messages, known.leaf!, conversation.leaf) ? known.leaf : conversation.leaf;
      this.#conversations.set(id, { ...conversation, leaf });
    }
  }

  /** When no tab makes this answer any more, see how far it came: it goes on where the server has the rest, or it is cut. */
  async #inherit(id: Id): Promise<void> {
    if (this.#inheriting.has(id) || this.#answerings.has(id) || this.#neighbours === null) return;
    this.#inheriting.add(id);
    const release = await this.#neighbours.inherit(id);
    this.#inheriting.delete(id);
    if (release === null) return;
    const message = this.#answerings.has(id) ? undefined : await this.#database?.message(id);
    const state = message?.answer?.state;
    if (message === undefined || (state !== "waiting" && state !== "streaming")) return release();
    const { answer } = message;
    if (answer?.serverId != null && answer.lastEventId !== null) return this.#run(message, null, release);
    this.#keepMessage({ ...message, answer: { ...answer!, state: "cut" } });
    await this.#writer.flush();
    release();
  }

  /** Ms since 1970, never the same twice: messages are ordered by it. */
  #now(): number {
    this.#latest = Math.max(Date.now(), this.#latest + 1);
    return this.#latest;
  }
}

/** The results that follow the message `id` on a path. */
function resultsBehind(path: readonly Message[], id: Id): Message[] {
  const behind = path.slice(path.findIndex((message) => message.id === id) + 1);
  const end = behind.findIndex(({ role }) => role !== "tool");
  return end === -1 ? behind : behind.slice(0, end);
}

/** Whether the message `id` is on the path to `leaf`. */
function isAbove(messages: ReadonlyMap<Id, Message>, id: Id, leaf: Id | null): boolean {
  return pathTo(messages, leaf).some((message) => message.id === id);
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
