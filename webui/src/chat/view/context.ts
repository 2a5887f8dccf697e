/** What every part of the chat page may ask for, without being handed it from part to part. */
import { createContext } from "svelte";
import type { Chats } from "../store/chats.svelte";
import type { Page } from "./page.svelte";

export const [getChats, setChats] = createContext<Chats>();
export const [getPage, setPage] = createContext<Page>();
