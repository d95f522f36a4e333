// Unary calls with grpc-go as it comes, all at once: calls TARGET METHOD, a request in base64 a line, an answer a line.
package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// raw passes messages on as the bytes that they are.
type raw struct{}

func (raw) Marshal(value any) ([]byte, error)      { return *value.(*[]byte), nil }
func (raw) Unmarshal(data []byte, value any) error { *value.(*[]byte) = append([]byte{}, data...); return nil }
func (raw) Name() string                           { return "proto" }

func main() {
	client, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(raw{}), grpc.MaxCallRecvMsgSize(1<<28)))
	if err != nil {
		panic(err)
	}
	defer client.Close()
	var requests [][]byte
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<28)
	for lines.Scan() {
		request, err := base64.StdEncoding.DecodeString(lines.Text())
		if err != nil {
			panic(err)
		}
		requests = append(requests, request)
	}
	// all at once, on one connection
	answers := make([]string, len(requests))
	var all sync.WaitGroup
	for number, request := range requests {
		all.Add(1)
		go func() {
			defer all.Done()
			until, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			var answer []byte
			if err := client.Invoke(until, os.Args[2], &request, &answer); err != nil {
				answers[number] = "error " + err.Error()
			} else {
				answers[number] = base64.StdEncoding.EncodeToString(answer)
			}
		}()
	}
	all.Wait()
	for _, answer := range answers {
		fmt.Println(answer)
	}
}
