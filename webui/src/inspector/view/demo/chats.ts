/** What the demo asks for: chats and texts of several kinds, which the model that comes with the server can go on with. */

export interface Asked {
  path: "v1/chat/completions" | "v1/completions";
  body: Record<string, unknown>;
}

interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

/** Long enough to fill a dozen blocks: what begins with it shares them. */
export const SHARED = Array.from(
  { length: 10 },
  (_, at) => `Rule ${at + 1}: be friendly, be brief, and say it when you do not know something.`,
).join(" ");

const PLACES = ["Norway", "Peru", "Kenya", "Japan", "France", "Egypt", "Canada", "India"];
const NAMES = ["Anna", "Bo", "Cleo", "Dan", "Ida", "Lev", "Mia", "Zorblat"];
const SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, pet: { type: "string" } },
  required: ["name", "age", "pet"],
  additionalProperties: false,
};

const user = (content: string): Message => ({ role: "user", content });
const rules: Message = { role: "system", content: SHARED };

type Random = () => number;
const pick = (values: string[], random: Random) => values[Math.floor(random() * values.length)]!;

const chat = (messages: Message[], max_tokens: number, more: object = {}): Asked => ({
  path: "v1/chat/completions",
  body: { messages, max_tokens, temperature: 0.8, ...more },
});

/** Chats with this number: kinds take turns, and what differs within a kind is drawn. */
export function chats(number: number, random: Random): Asked {
  const [place, name] = [pick(PLACES, random), pick(NAMES, random)];
  const kinds = [
    () => chat([rules, user(`What is the capital of ${place}?`)], 60),
    () => chat([user(`Tell me a story about a dragon called ${name}`)], 300),
    () => chat([user(`My name is ${name}.`), { role: "assistant", content: "Hello!" }, user("What is my name?")], 40),
    () => chat([rules, user(`Write a poem about ${name}`)], 200),
    () => chat([user(`Count from ${number % 20} to ${60 + (number % 30)}`)], 400, { temperature: 0 }),
  ];
  return kinds[number % kinds.length]!();
}

/** So many texts over one connection; every other time they begin alike, and half of the time they are long. */
export function texts(number: number, width: number, random: Random): Asked {
  const beginning = number % 2 ? `${SHARED} ` : "";
  const prompt = Array.from({ length: width }, () => `${beginning}Once upon a time ${pick(NAMES, random)}`);
  return { path: "v1/completions", body: { prompt, max_tokens: number % 4 < 2 ? 200 : 40, temperature: 0.9 } };
}

/** An answer by a schema: its grammar is compiled, and masks go to the sampler. */
export function byGrammar(random: Random): Asked {
  const schema = { type: "json_schema", json_schema: { name: "pet", schema: SCHEMA, strict: true } };
  const asked = `JSON with name ${pick(NAMES, random)}, age ${10 + Math.floor(40 * random())} and pet cat`;
  return chat([user(asked)], 80, { temperature: 0, response_format: schema });
}

/** A long answer, to be read slowly or left early. */
export const longAnswer = (random: Random): Asked =>
  chat([user(`Count from ${Math.floor(9 * random())} to 99`)], 900, { temperature: 0 });
