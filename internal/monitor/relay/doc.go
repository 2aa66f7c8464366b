// Package relay carries requests to the guest agent: it makes the conversation
// with the agent over the agent link, and forwards what arrives at a monitor's
// socket through it. It does not know what the requests say, nor when a link
// is to be made; that is for the monitor's process.
package relay
