/** Chats of several kinds that the demo sends: what they ask is what the model that comes with the server can answer. */

interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface DemoChat {
  messages: Message[];
  max_tokens: number;
  temperature: number;
}

/** Long enough to fill a dozen blocks: chats that begin with it share them. */
export const SHARED_SYSTEM = Array.from(
  { length: 10 },
  (_, at) => `Rule ${at + 1}: be friendly, be brief, and say it when you do not know something.`,
).join(" ");

const PLACES = ["Norway", "Peru", "Kenya", "Japan", "France", "Egypt", "Canada", "India"];
const NAMES = ["Anna", "Bo", "Cleo", "Dan", "Ida", "Lev", "Mia", "Zorblat"];

const user = (content: string): Message => ({ role: "user", content });

type Kind = (pick: (values: string[]) => string, number: number) => DemoChat;

const KINDS: Kind[] = [
  (pick) => ({ messages: [user(`What is the capital of ${pick(PLACES)}?`)], max_tokens: 40, temperature: 0 }),
  (pick) => ({
    messages: [user(`Tell me a story about a dragon called ${pick(NAMES)}`)],
    max_tokens: 300,
    temperature: 0.9,
  }),
  (pick) => ({
    messages: [{ role: "system", content: SHARED_SYSTEM }, user(`What is the capital of ${pick(PLACES)}?`)],
    max_tokens: 60,
    temperature: 0.5,
  }),
  (_pick, number) => ({
    messages: [user(`Count from ${number % 20} to ${60 + (number % 30)}`)],
    max_tokens: 400,
    temperature: 0,
  }),
  (pick) => ({
    messages: [
      user(`My name is ${pick(NAMES)}.`),
      { role: "assistant", content: "Nice to meet you!" },
      user("What is my name?"),
    ],
    max_tokens: 40,
    temperature: 0,
  }),
  (pick) => ({
    messages: [{ role: "system", content: SHARED_SYSTEM }, user(`Write a poem about ${pick(NAMES)}`)],
    max_tokens: 200,
    temperature: 0.8,
  }),
  (pick) => ({
    messages: [user(`JSON with name ${pick(NAMES)}, age ${10 + NAMES.length} and pet cat`)],
    max_tokens: 60,
    temperature: 0,
  }),
];

/** The chat with this number: kinds take turns, and what differs within a kind is drawn by `random`. */
export function demoChat(number: number, random: () => number = Math.random): DemoChat {
  const pick = (values: string[]) => values[Math.floor(random() * values.length)]!;
  return KINDS[number % KINDS.length]!(pick, number);
}
