// Requests of the Go SDK of Azure IoT Operations at a broker on 127.0.0.1: a SET every 100 ms, each with a value of its
// own, or the observation of a key.
//
// `PROGRAM PORT CLIENT-ID` prints `connected` at each connection, `set` for each SET that was answered with +OK,
// `failed REASON` for each other one, and `error REASON` for each lost connection, until standard input ends. The SDK's
// client of the state store is a thin layer over the two modules that are used here, the session client and the invoker
// of commands: its requests have this topic, this response topic and these payloads. All waiting and repeating is in
// those two, with their own settings.
//
// `PROGRAM PORT CLIENT-ID KEY` observes KEY instead. It sends KEYNOTIFY at each connection, as that client does for the
// keys that it observes, and prints `observing` for each that was answered with +OK, and `notified` with the words of
// each notification.
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/Azure/iot-operations-sdks/go/mqtt"
	"github.com/Azure/iot-operations-sdks/go/protocol"
)

const (
	requests      = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke"
	notifications = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/{clientId}/command/notify/{key}"
	interval      = 100 * time.Millisecond
)

var (
	output sync.Mutex
	lines  = bufio.NewWriter(os.Stdout)
)

func say(format string, values ...any) {
	output.Lock()
	defer output.Unlock()
	fmt.Fprintf(lines, format+"\n", values...)
	lines.Flush()
}

func must[T any](value T, err error) T {
	check(err)
	return value
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func encoded(name string) string {
	return strings.ToUpper(hex.EncodeToString([]byte(name)))
}

func main() {
	if len(os.Args) != 3 && len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: PROGRAM PORT CLIENT-ID [KEY]")
		os.Exit(2)
	}
	port, name, observed := os.Args[1], os.Args[2], os.Args[3:]
	// Keep alive and session expiry are those of the SDK's settings from the environment.
	client := must(mqtt.NewSessionClient(
		"mqtt://127.0.0.1:"+port,
		mqtt.WithClientID(name),
		mqtt.WithKeepAlive(60*time.Second),
		mqtt.WithSessionExpiry(time.Hour),
	))
	invoker := must(protocol.NewCommandInvoker(
		client, protocol.Raw{}, protocol.Raw{}, requests,
		protocol.WithResponseTopicPrefix("clients/{clientId}"),
		protocol.WithResponseTopicSuffix("response"),
		protocol.WithTopicTokens{"clientId": encoded(name)},
	))
	subscribed := make(chan struct{})
	client.RegisterConnectEventHandler(func(*mqtt.ConnectEvent) {
		say("connected")
		<-subscribed
		for _, key := range observed {
			request(invoker, "observing", "KEYNOTIFY", key)
		}
	})
	client.RegisterFatalErrorHandler(func(err error) { say("error %v", err) })
	check(client.Start())
	check(invoker.Start(context.Background()))
	for _, key := range observed {
		receiver := must(protocol.NewTelemetryReceiver(
			client, protocol.Raw{}, notifications, notified,
			protocol.WithTopicTokens{"clientId": encoded(name), "key": encoded(key)},
		))
		check(receiver.Start(context.Background()))
	}
	close(subscribed)
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	if len(observed) > 0 {
		<-ended
		return
	}
	for number := 0; ; number++ {
		select {
		case <-ended:
			return
		case <-time.After(interval):
			go request(invoker, "set", "SET", name, fmt.Sprint(number))
		}
	}
}

func notified(_ context.Context, told *protocol.TelemetryMessage[[]byte]) error {
	say("notified %s", strings.Join(strings.Fields(string(told.Payload)), " "))
	return nil
}

// Send a request, and say done if it was answered with +OK.
func request(invoker *protocol.CommandInvoker[[]byte, []byte], done string, words ...string) {
	payload := fmt.Sprintf("*%d\r\n", len(words))
	for _, word := range words {
		payload += fmt.Sprintf("$%d\r\n%s\r\n", len(word), word)
	}
	answer, err := invoker.Invoke(context.Background(), []byte(payload))
	switch {
	case err != nil:
		say("failed %s", strings.ReplaceAll(err.Error(), "\n", " "))
	case string(answer.Payload) != "+OK\r\n":
		say("failed %q", answer.Payload)
	default:
		say("%s", done)
	}
}
