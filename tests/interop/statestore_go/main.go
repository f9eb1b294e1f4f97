// SETs of the Go SDK of Azure IoT Operations at a broker on 127.0.0.1, one every 100 ms, each with a value of its own.
//
// `PROGRAM PORT CLIENT-ID` prints `connected` at each connection, `set` for each SET that was answered with +OK,
// `failed REASON` for each other one, and `error REASON` for each lost connection, until standard input ends. The SDK's
// client of the state store is a thin layer over the two modules that are used here, the session client and the invoker
// of commands: its requests have this topic, this response topic and these payloads. All waiting and repeating is in
// those two, with their own settings.
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
	requests = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke"
	interval = 100 * time.Millisecond
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

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: PROGRAM PORT CLIENT-ID")
		os.Exit(2)
	}
	port, name := os.Args[1], os.Args[2]
	// Keep alive and session expiry are those of the SDK's settings from the environment.
	client := must(mqtt.NewSessionClient(
		"mqtt://127.0.0.1:"+port,
		mqtt.WithClientID(name),
		mqtt.WithKeepAlive(60*time.Second),
		mqtt.WithSessionExpiry(time.Hour),
	))
	client.RegisterConnectEventHandler(func(*mqtt.ConnectEvent) { say("connected") })
	client.RegisterFatalErrorHandler(func(err error) { say("error %v", err) })
	invoker := must(protocol.NewCommandInvoker(
		client, protocol.Raw{}, protocol.Raw{}, requests,
		protocol.WithResponseTopicPrefix("clients/{clientId}"),
		protocol.WithResponseTopicSuffix("response"),
		protocol.WithTopicTokens{"clientId": strings.ToUpper(hex.EncodeToString([]byte(name)))},
	))
	check(client.Start())
	check(invoker.Start(context.Background()))
	ended := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(ended)
	}()
	for number := 0; ; number++ {
		select {
		case <-ended:
			return
		case <-time.After(interval):
			go set(invoker, name, fmt.Sprint(number))
		}
	}
}

func set(invoker *protocol.CommandInvoker[[]byte, []byte], key, value string) {
	request := fmt.Sprintf("*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(key), key, len(value), value)
	answer, err := invoker.Invoke(context.Background(), []byte(request))
	switch {
	case err != nil:
		say("failed %s", strings.ReplaceAll(err.Error(), "\n", " "))
	case string(answer.Payload) != "+OK\r\n":
		say("failed %q", answer.Payload)
	default:
		say("set")
	}
}
